"""The ranks of one world as processes of their own, on the CPU, on a GPU each, or all of them on one GPU.

NCCL refuses two ranks on one GPU where their host hash *and* their bus id are equal. ``NCCL_HOSTID`` replaces the
host hash: ranks with different ones are hosts of their own to NCCL and send to each other by sockets. The driver
gives the GPU to each process in turn, for some milliseconds, so a collective takes a few turns: order, numbers,
failures and counts of launches are real there, times are not.

What always holds: a rank writes lines of JSON into its file and everything else into its log; no rank outlives
:meth:`World.kill`; what is said of a rank names no host, no address and no path (:func:`without_places`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # before torch is imported
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

SOCKETS = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",  # lo must be named
    "NCCL_NET_PLUGIN": "none", "NCCL_RAS_ENABLE": "0",  # RAS is a thread and a port that nobody needs here
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",  # plain pinned memory: a virtual machine may have no NUMA node
    "NCCL_MAX_CTAS": "4",  # the kernels of all ranks must fit beside backward's
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",  # the fewest turns
}  # fmt: skip
HOST_IDS = {"NCCL_HOSTID": "minddp-host-{rank}", **SOCKETS}
# Which environment lets ranks share a GPU, in order of likelihood; {rank} is filled in.
WAYS: dict[str, dict[str, str]] = {
    "hostid": HOST_IDS,
    "hostid-nocumem": {**HOST_IDS, "NCCL_CUMEM_ENABLE": "0"},
    "hostid-plain": {"NCCL_HOSTID": "minddp-host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"},
    "devices": {},  # a GPU for each rank, with NCCL's own choices
    "same-host": {},  # one GPU and one host id: NCCL must refuse it, which shows that the others do what they seem to
}
COMMON = {
    "NCCL_DEBUG": "WARN", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo", "TORCH_SHOW_CPP_STACKTRACES": "0",
}  # fmt: skip


def environment(way: str, device: str, rank: int) -> dict[str, str]:
    """What ``way`` sets for a rank on that kind of device; on the CPU nothing of NCCL's."""
    own = WAYS[way] if device == "cuda" else {}
    local = rank if way == "devices" and device == "cuda" else 0
    settings = {name: value.format(rank=rank) for name, value in own.items()}
    return {**COMMON, "LOCAL_RANK": str(local), "DEVICE": device, **settings}


_IPV6 = r"(?=[0-9a-f:]*::|(?:[0-9a-f]{1,4}:){7})(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?:%\w+)?"


def without_places(text: str) -> str:
    """``text`` without this host's name, without addresses, and with the last name of each path alone."""
    if host := socket.gethostname():
        text = re.sub(rf"\b{re.escape(host)}\b", "<host>", text)
    text = re.sub(r"\[?\b\d{1,3}(\.\d{1,3}){3}\b\]?(:\d+|<\d+>)?", "<address>", text)
    text = re.sub(rf"(?<![\w.:])\[?{_IPV6}\]?(:\d+|<\d+>)?(?![\w:])", "<address>", text)
    return re.sub(r"(?<![\w/.])~?/(?:[^\s/:'\"()\[\],]+/)+([^\s/:'\"()\[\],]*)", r"\1", text)


class Told:
    """What is printed, and the facts behind it.

    With each line the file ``output`` has all of them, since this process may be ended at any moment.
    """

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}

    def say(self, line: str) -> None:
        line = without_places(line)
        self.lines.append(line)
        if self.output is not None:
            partial = self.output.with_name(f".{self.output.name}.{os.getpid()}")
            partial.write_text(json.dumps({**self.facts, "table": self.lines}) + "\n")
            partial.replace(self.output)
        print(line, flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class World:
    """``ranks`` processes that run ``rank.py`` with ``command``, each with a file of answers and a log in ``folder``.

    What lies in ``folder`` before is deleted.
    """

    alive: list[World] = []

    def __init__(self, command: list[str], ranks: int, way: str, device: str, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        World.alive.append(self)
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(ranks):
            env = {**os.environ, **environment(way, device, rank), **shared, "RANK": str(rank)}
            answers = ["--answers", str(folder / f"answers{rank}")]
            with (folder / f"log{rank}").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HERE / "rank.py"), *command, *answers],
                        env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip

    def answers(self, rank: int) -> list[dict[str, Any]]:
        """The lines that a rank has written so far."""
        path = self.folder / f"answers{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def log(self, rank: int, most: int = 12) -> list[str]:
        """The last ``most`` lines of a rank's log that tell something, fit to be shown."""
        lines = (self.folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
        told = [line for line in lines if line and not line.startswith("[W") and "NCCL INFO" not in line]
        return [f"{rank}| {without_places(line)[:230]}" for line in told[-most:]]

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def wait(
        self,
        seconds: float,
        stall: float | None = None,
        patient: bool = False,
        ranks: Sequence[int] | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> str:
        """Empty once the ranks have ended; otherwise why it waits no longer. Ends no rank.

        Args:
            seconds: to wait at most.
            stall: to wait at most without a new answer of any rank.
            patient: whether it also waits for the others of a rank that has failed.
            ranks: to wait for; none: all of them.
            each: is called whenever there are new answers.
        """
        begin = last = time.monotonic()
        seen = -1
        ranks = range(len(self.processes)) if ranks is None else ranks
        while any(self.codes()[rank] is None for rank in ranks):
            now, count = time.monotonic(), sum(len(self.answers(rank)) for rank in range(len(self.processes)))
            if count != seen:
                seen, last = count, now
                each()
            if now - begin > seconds:
                return f"no end after {seconds:.0f} s"
            if stall is not None and now - last > stall:
                return f"nothing new for {stall:.0f} s"
            if not patient and any(self.codes()) and now - last > 8:
                return f"exit codes {self.codes()}"
            time.sleep(0.05)
        return ""

    def stacks(self) -> None:
        """Each rank that still runs writes its threads' stacks into its log."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self in World.alive:
            World.alive.remove(self)
