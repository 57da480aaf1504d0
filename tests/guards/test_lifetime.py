"""What is destroyed first: groups must outlive reducers, and their threads must end before the interpreter."""

from __future__ import annotations

import _thread
import gc
import hashlib
import socket
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import minddp
from minddp import lifetime
from minddp.guards import location
from tests import forked
from tests.on_ranks import on_ranks
from tests.ranks_pool import free_port, run_ranks


@on_ranks(2)
def test_the_group_goes_after_the_reducer(rank: int, world_size: int) -> None:
    """A reducer that dropped a Gloo group's last reference under the GIL could hang."""
    ends: list[str] = []
    group = dist.new_group()
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    ddp(torch.ones(2, 3)).sum().backward()
    reducer = ddp.reducer
    weakref.finalize(reducer, ends.append, "reducer")
    weakref.finalize(group, ends.append, "group")
    dist.destroy_process_group(group)
    del group, ddp
    gc.collect()
    del reducer  # the last that knows the group
    assert ends == ["reducer", "group"]


def _trial() -> list[weakref.ref[object]]:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ddp(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [weakref.ref(optimizer), weakref.ref(ddp), weakref.ref(ddp.module)]


@on_ranks(1)
def test_a_closure_keeps_no_optimizer_wrapper_or_module(rank: int, world_size: int) -> None:
    kept = _trial()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def _looked_at() -> weakref.ref[torch.nn.Module]:
    module = torch.nn.Linear(1, 1)
    location.of_thread(threading.current_thread())
    return weakref.ref(module)


def test_who_looks_at_threads_keeps_nothing_of_theirs() -> None:
    """A frame that is kept keeps a wrapper that the program has dropped, and whose backward would be averaged."""
    gc.disable()
    try:
        assert _looked_at()() is None
    finally:
        gc.enable()


@on_ranks(1)
def test_the_end_waits_for_threads_that_want_to_run(rank: int, world_size: int) -> None:
    """A thread without the GIL, as one of a group's that waits for the processor on a busy machine: with a fixed
    moment Python was gone before it, and the process aborted. The wrapper is gone, as one of a function that
    ``torch.multiprocessing.spawn`` runs."""
    minddp.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(2, 3)).sum().backward()
    ended: list[bytes] = []
    _thread.start_new_thread(lambda: ended.append(hashlib.pbkdf2_hmac("sha256", b"", b"", 150_000)), ())
    assert not ended
    lifetime._settle_groups()
    assert ended


@pytest.mark.parametrize("share, waited", [(0.0, 30.0), (0.01, 30.0), (1.0, 1.0)])
def test_the_end_counts_what_threads_had_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, share: float, waited: float
) -> None:
    """A thread wants it for 30 s: on a busy machine it gets little or nothing, and is waited for; one that gets all
    of it computes for the program."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(lifetime, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(lifetime, "_running", lambda: [("1", share * now)] if now < 30.0 else [])
    lifetime._rest()
    assert waited <= now < waited + 0.1


def test_a_forked_process_does_not_wait_for_the_thread_that_ends_it() -> None:
    """Python's object of its first thread has the parent's number."""
    fork = "import os; from minddp import lifetime; os.fork() and os.wait(); print([*lifetime._running()])"
    assert forked.run(fork).stdout == "[]\n[]\n"


FIRST_ENDS = """
import sys, time
import torch, torch.distributed as dist
import minddp
from minddp.guards import times, watchdog

times.set_look(0.05)
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
minddp.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
dog = watchdog.current(dist.group.WORLD)
while rank == 1 and not dog.lost:  # rank 0 holds the store, and has ended
    time.sleep(0.01)
"""


def test_who_outlives_the_stores_host_writes_nothing_to_stderr() -> None:
    """Torch's client would write the frames of its C++ stack at the next request."""
    port = str(free_port())
    programs = [forked.Program(FIRST_ENDS, str(rank), port, rank=rank) for rank in (0, 1)]
    assert [(program.communicate(120), program.returncode) for program in programs] == [(("", ""), 0)] * 2


def test_a_connection_whose_other_end_is_closed_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        links = lifetime.connections(server.getsockname()[1])
        assert links == {client.fileno()} and not lifetime.hangs_up(links)
        accepted.close()
        deadline = time.monotonic() + 120
        while not lifetime.hangs_up(links) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert client.getblocking() and lifetime.hangs_up(links)


def _power_sgd(rank: int, world_size: int) -> None:
    """Ends right after a backward whose hook's callbacks hold the group."""
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(16, 16))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=False, warm_start=False
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        ddp(torch.ones(2, 16)).sum().backward()


@pytest.mark.long
def test_no_thread_of_a_group_destroys_it() -> None:
    """It would join itself: with torch's class, one of five such ends aborts the process."""
    for _ in range(40):
        run_ranks(_power_sgd, 2)


SCRIPT = """
import atexit, os, sys, weakref
groups = []
# Registered before minddp is imported, and so called after what minddp does at exit.
atexit.register(lambda: print("at exit", [group() is not None for group in groups]))

import torch, minddp
import torch.distributed as dist

def train():
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()  # with the forward, all that torch imports late
    return ddp

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups.append(weakref.ref(dist.group.WORLD))
kept = train()
if "function" in sys.argv:
    del kept
if "undestroyed" not in sys.argv:
    dist.destroy_process_group()
print("after destroy", [group() is not None for group in groups])
if "global" in sys.argv:
    assert isinstance(kept.module, torch.nn.Linear)
"""


@pytest.mark.parametrize(
    "way, after_destroy, at_exit",
    [
        pytest.param("function", False, False, marks=pytest.mark.all),
        ("global", True, False),
        pytest.param("undestroyed", True, True, marks=pytest.mark.all),
    ],
)
def test_a_destroyed_group_is_gone_before_the_interpreter(way: str, after_destroy: bool, at_exit: bool) -> None:
    """Else its thread may ask for the GIL of an interpreter that shuts down, and the process aborts."""
    command = [sys.executable, "-c", SCRIPT, way]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"after destroy [{after_destroy}]", f"at exit [{at_exit}]"]


@on_ranks(1)
def test_a_wrapper_that_was_given_up_can_be_looked_at(rank: int, world_size: int) -> None:
    """As a handler of the program's does that runs after minddp's."""
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    ddp._minddp_let_go()
    assert str(ddp.device) == "cpu" and ddp.process_group is None
    assert sorted(ddp.state_dict()) == ["module.bias", "module.weight"]
