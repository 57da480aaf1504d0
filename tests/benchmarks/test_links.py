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
from links import LinkError, ShapedNetwork, parse_rate  # noqa: E402


def _can_shape() -> str | None:
    """Why this machine cannot make shaped links, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        return "needs root, ip and tc"
    try:
        with ShapedNetwork("1gbit", 2):
            return None
    except LinkError as error:
        return str(error)


_obstacle = _can_shape()
needs_links = pytest.mark.skipif(_obstacle is not None, reason=str(_obstacle))


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


@needs_links
def test_an_exception_leaves_nothing_of_two_networks() -> None:
    with pytest.raises(ZeroDivisionError), ShapedNetwork("1gbit", 2), ShapedNetwork("1gbit", 3):
        assert len(_namespaces(os.getpid())) == 2 + 4
        raise ZeroDivisionError
    assert _namespaces(os.getpid()) == []


@needs_links
def test_a_rate_that_tc_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ShapedNetwork("1gbit", 2)
    network.rate = "1parsec"
    with pytest.raises(LinkError, match=r"tc .*1parsec.* failed"), network:
        pass
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
    process = _hold()
    process.send_signal(number)
    assert process.wait() != 0
    assert _namespaces(process.pid) == []


@needs_links
def test_the_next_one_cleans_up_after_a_killed_one() -> None:
    process = _hold()
    process.kill()
    process.wait()
    assert _namespaces(process.pid) != []
    with ShapedNetwork("1gbit", 2):
        assert _namespaces(process.pid) == []


def test_without_root_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match="needs root: run the command under sudo"), ShapedNetwork("1gbit"):
        pass


def test_without_the_tools_the_message_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(LinkError, match="needs ip and tc: install"), ShapedNetwork("1gbit"):
        pass


@pytest.mark.parametrize("rate", ["fast", "1", "1gb", "0mbit", "-1gbit", "1gbit; true"])
def test_a_bad_rate_is_named(rate: str) -> None:
    with pytest.raises(LinkError, match="is not understood: write for example"):
        ShapedNetwork(rate)


def test_rates() -> None:
    assert [parse_rate(rate) for rate in ("1gbit", "2.5mbit", "64kbit")] == [1e9, 2.5e6, 64e3]


@pytest.mark.parametrize("ranks", [1, 201])
def test_a_bad_number_of_ranks_is_named(ranks: int) -> None:
    with pytest.raises(LinkError, match=f"not {ranks}"):
        ShapedNetwork("1gbit", ranks)
