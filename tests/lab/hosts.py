"""Two hosts of three ranks each (network and PID namespaces), and what the survivors of a fault say.

    make lab ARGS=hosts
    make lab ARGS="hosts --scenario store_stands_still"

Needs root. Each row: whom the survivors have named and after how many seconds, or that all have gone on.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, AT = 6, 100, 50
TIMEOUT = 30  # of the process group: a whole host that is cut off is found then, if Gloo does not say so
NAMED_WITHIN = 15.0


def _rank(rank: int, address: str, port: int, folder: Path, scenario: str) -> None:
    """Trains; writes what it has met, and when, into a file of its own."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import minddp
    from minddp.guards import watchdog

    torch.set_num_threads(1)
    told, fault = folder / f"rank{rank}", folder / "fault"
    store = dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT))
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(16, 16))
    if scenario == "caller_while_it_reads":
        conclude = watchdog.Watchdog._conclude

        def dies(self: watchdog.Watchdog, *args: object) -> None:
            with_it = folder / "caller"
            try:
                with_it.touch(exist_ok=False)
            except FileExistsError:
                return conclude(self, *args)  # type: ignore[arg-type]
            fault.write_text(f"{time.time()} {rank}")
            os.kill(os.getpid(), signal.SIGKILL)

        watchdog.Watchdog._conclude = dies  # type: ignore[method-assign]
    try:
        for step in range(STEPS):
            if step == AT:
                (folder / f"at{rank}").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
                if rank == 1 and scenario in ("one_is_late", "caller_while_it_reads"):
                    time.sleep(14)
            if step >= AT and scenario == "store_stands_still":
                time.sleep(0.4)
            ddp(torch.ones(2, 16)).sum().backward()
        told.write_text(f"{time.time()} through")
    except BaseException as error:
        lost = getattr(error, "lost_ranks", [])
        told.write_text(f"{time.time()} {type(error).__name__} {lost} {' '.join(str(error).split())[:300]}")
    os._exit(0)


def _host(first: int, address: str, port: int, folder: Path, scenario: str) -> None:
    """Three ranks of one host, which end with this process."""
    command = [sys.executable, "-m", "tests.lab.hosts", "--of", scenario, str(folder), address, str(port)]
    ranks = [subprocess.Popen([*command, "--rank", str(first + i)], cwd=ROOT) for i in range(3)]
    (folder / f"pids{first}").write_text(" ".join(str(rank.pid) for rank in ranks))
    waits = folder / f"kill{first}"
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        if waits.exists():
            for i in map(int, waits.read_text().split()):
                ranks[i].kill()
            waits.unlink()


def _kill(*places: tuple[int, str]) -> Callable[[Path, subprocess.Popen[str]], None]:
    def fault(folder: Path, store: subprocess.Popen[str]) -> None:
        for first, which in places:
            part = folder / f"part{first}"
            part.write_text(which)
            part.rename(folder / f"kill{first}")

    return fault


def _stop_store(folder: Path, store: subprocess.Popen[str]) -> None:
    store.send_signal(signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 20; kill -CONT {store.pid}"])


def _nothing(folder: Path, store: subprocess.Popen[str]) -> None:
    pass


# What happens in the middle of training, and which ranks are lost: none where all must go on.
SCENARIOS: dict[str, tuple[Callable[[Path, subprocess.Popen[str]], None], tuple[int, ...]]] = {
    "who_looks_and_its_neighbour": (_kill((0, "1 2")), (1, 2)),
    "one_of_each_host": (_kill((0, "2"), (3, "0")), (2, 3)),
    "caller_while_it_reads": (_nothing, ()),
    "whole_host": (_kill((3, "0 1 2")), (3, 4, 5)),
    "store_stands_still": (_stop_store, ()),
    "one_is_late": (_nothing, ()),
}


def run(scenario: str) -> bool:
    """Whether the survivors did what they must. Prints a row."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import links

    fault, lost = SCENARIOS[scenario]
    source = (
        "import sys, time, torch.distributed as d; s = d.TCPStore(sys.argv[1], 29777, None, True, "
        "wait_for_workers=False); print('up', flush=True); time.sleep(3000)"
    )
    with links.ShapedNetwork("10gbit", 2) as network, tempfile.TemporaryDirectory() as name:
        folder, ends = Path(name), [network.endpoint(host) for host in range(2)]
        at = ["ip", "netns", "exec"]
        store = subprocess.Popen(
            [*at, ends[0].namespace, sys.executable, "-c", source, ends[0].address], stdout=subprocess.PIPE, text=True
        )
        assert store.stdout is not None and store.stdout.readline() == "up\n"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": ends[0].interface, "OMP_NUM_THREADS": "1"}
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [sys.executable, "-m", "tests.lab.hosts", "--of", scenario, str(folder), ends[0].address, "29777"]
        hosts = [
            subprocess.Popen(
                [*at, end.namespace, *own, *command, "--host", str(3 * i)], cwd=ROOT, env=environment,
                stderr=subprocess.DEVNULL,
            )
            for i, end in enumerate(ends)
        ]  # fmt: skip
        try:
            _await(lambda: all((folder / f"at{rank}").exists() for rank in range(RANKS)), 120)
            began = time.time()
            (folder / "go").touch()
            time.sleep(0.0 if scenario == "one_is_late" else 0.05)
            fault(folder, store)
            _await(lambda: all(host.poll() is not None for host in hosts), TIMEOUT + 60)
        finally:
            for process in [*hosts, store]:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        if (folder / "fault").exists():
            moment, who = (folder / "fault").read_text().split()
            began, lost = float(moment), (int(who),)
        return _judged(scenario, folder, began, lost)


def _judged(scenario: str, folder: Path, began: float, lost: tuple[int, ...]) -> bool:
    said = {rank: (folder / f"rank{rank}").read_text().split(" ", 2) for rank in range(RANKS) if rank not in lost
            and (folder / f"rank{rank}").exists()}  # fmt: skip
    survivors = [rank for rank in range(RANKS) if rank not in lost]
    ended = {rank: words for rank, words in said.items() if words[1] != "through"}
    seconds = max((float(words[0]) - began for words in said.values()), default=-1.0)
    named = {int(r) for w in ended.values() for r in w[2].partition("[")[2].partition("]")[0].split(",") if r.strip()}
    if lost:
        limit = TIMEOUT + 10 if scenario == "whole_host" else NAMED_WITHIN
        good = len(ended) == len(survivors) and seconds <= limit and named <= set(lost) and bool(named)
    else:
        good = len(said) == RANKS and not ended
    print(f"{'ok' if good else 'SHORT':6} {scenario:28} {len(said)} of {len(survivors)} survivors have ended, "
          f"{len(said) - len(ended)} well; named {sorted(named)}, the last after {seconds:.1f} s")  # fmt: skip
    if not good:
        print(*(f"         rank {rank}: {' '.join(words[1:])}" for rank, words in said.items()), sep="\n")
    return good


def _await(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_so():
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--of", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        scenario, folder, address, port = options.of
        start, number = (_host, options.host) if options.rank is None else (_rank, options.rank)
        start(number, address, int(port), Path(folder), scenario)
        return 0
    rows = [run(scenario) for scenario in options.scenario or SCENARIOS]
    return 0 if all(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
