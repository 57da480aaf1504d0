"""Runs a user's script by torchrun, as it is or under ``minddp.run``; reads the report that it leaves.

A run has a timeout; when it is over torchrun and its ranks are killed, by process id.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.forked import children_of

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
SWAPPED = ROOT / "tests" / "lab" / "libraries" / "swapped"
NO_SHUTDOWN = Path(__file__).parent / "no_shutdown.py"

CLASS = {
    "torch": "torch.nn.parallel.distributed.DistributedDataParallel",
    "minddp": "minddp.ddp.DistributedDataParallel",
}


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # A store of its own for each start: the launcher's outlives a restart, and in it the new ranks may
        # read the addresses of the dead.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _end(process: subprocess.Popen[str]) -> None:
    for pid in [*children_of(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _communicate(
    command: list[str], folder: Path, timeout: float, variables: dict[str, str] | None = None
) -> tuple[int | str, str]:
    """(exit status, output) of one command in ``folder``."""
    process = subprocess.Popen(
        command,
        env={**_environment(), **(variables or {})},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        return f"no end within {timeout} s", output


def run_shipped(impl: str, module: str, folder: Path, timeout: float) -> tuple[int | str, str]:
    """(exit status, output) of a library's own test program, which knows nothing of minddp: sitecustomize does."""
    folder.mkdir(parents=True)
    ranks = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", module]
    variables = {"ACCELERATE_USE_CPU": "true"}
    if impl == "minddp":
        variables["PYTHONPATH"] = os.pathsep.join([str(SWAPPED), _environment()["PYTHONPATH"]])
    return _communicate(command, folder, timeout, variables)


def run(
    impl: str,
    script: str,
    out: Path,
    *arguments: str,
    ranks: int = 2,
    restarts: int = 0,
    timeout: float = 150,
    torchrun: bool = True,
) -> Any:
    """Runs ``scripts/<script> <arguments> <out>`` with ``impl``'s class and returns the JSON in ``out``.

    ``torchrun``: otherwise one process is started, and starts the other ranks itself.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
    ]
    runner = ["-m", "minddp.run"] if impl == "minddp" else [str(NO_SHUTDOWN)]
    command = [sys.executable, *(launcher if torchrun else []), *runner, str(SCRIPTS / script), *arguments, str(out)]
    status, output = _communicate(command, out.parent, timeout)
    if status == 0:
        return json.loads(out.read_text())
    raise AssertionError(f"{script} with {impl} ended with {status}:\n{output[-6000:]}")
