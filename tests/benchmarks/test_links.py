"""benchmarks/links.py: shaped namespaces work, and are gone afterwards however the process ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402
from links import LinkError, ShapedNetwork  # noqa: E402


def _can_shape() -> str | None:
    """Why this machine cannot make shaped links, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        return "needs root, ip and tc"
    try:
        with ShapedNetwork("1gbit", 2):
            return None
    except LinkError as error:
        return str(error)


links_obstacle = _can_shape()
needs_links = pytest.mark.skipif(links_obstacle is not None, reason=str(links_obstacle))


def _namespaces(pid: int) -> list[str]:
    folder = Path("/var/run/netns")
    return [p.name for p in folder.glob(f"minddp-{pid}-*")] if folder.exists() else []


def _time_allreduce(rank: int, world_size: int, numel: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    seconds = []
    for _ in range(3):
        x = torch.ones(numel)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        seconds.append(time.perf_counter() - begin)
    return min(seconds), float(x[-1])


@needs_links
@pytest.mark.parametrize("world_size", [2, 3])
def test_bandwidth_is_at_most_the_rate(world_size: int) -> None:
    nbytes = 4_000_000
    with harness.Ranks(world_size, link="400mbit") as ranks:
        results = ranks.run(_time_allreduce, nbytes // 4)
        assert len(_namespaces(os.getpid())) == (2 if world_size == 2 else 4)
    # A ring moves 2 (n - 1) / n of the bytes over each link; the 100 kB bucket may pass at once.
    bound = (2 * (world_size - 1) / world_size * nbytes - 2 * 100_000) * 8 / 400e6
    assert all(seconds > bound and total == world_size for seconds, total in results)
    assert _namespaces(os.getpid()) == []


_HOLD = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
sys.path.insert(0, {str(BENCHMARKS)!r})
from links import ShapedNetwork
with ShapedNetwork("1gbit", 3):
    print("ready", flush=True)
    time.sleep(60)
"""


def _hold() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(_namespaces(process.pid)) == 4
    return process


@needs_links
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: int) -> None:
    with _hold() as process:
        process.send_signal(number)
    assert process.returncode != 0
    assert _namespaces(process.pid) == []


@needs_links
def test_the_next_one_cleans_up_after_a_killed_one() -> None:
    with _hold() as process:
        process.kill()
    assert _namespaces(process.pid) != []
    with ShapedNetwork("1gbit", 2):
        assert _namespaces(process.pid) == []
