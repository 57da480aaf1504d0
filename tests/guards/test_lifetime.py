"""What is destroyed first: groups must outlive reducers, and their threads must end before the interpreter."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp import lifetime
from minddp.guards import location
from minddp.testing import RankPool, run_ranks


def order_of_ends(rank: int, world_size: int) -> list[str]:
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
    return ends


def test_the_group_goes_after_the_reducer() -> None:
    """A reducer that dropped a Gloo group's last reference under the GIL could hang."""
    assert run_ranks(order_of_ends, 2) == [["reducer", "group"]] * 2


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


def _searches(rank: int, world_size: int) -> list[bool]:
    kept = _trial()
    gc.collect()
    return [ref() is None for ref in kept]


def test_a_closure_keeps_no_optimizer_wrapper_or_module() -> None:
    assert run_ranks(_searches, 1) == [[True] * 3]


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


def _busy_at_the_end(rank: int, world_size: int) -> tuple[bool, bool]:
    """A thread without the GIL, as one of a group's that waits for the processor on a busy machine. The wrapper is
    gone, as one of a function that ``torch.multiprocessing.spawn`` runs."""
    minddp.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(2, 3)).sum().backward()
    work = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 150_000), daemon=True)
    work.start()
    was_alive = work.is_alive()
    lifetime._settle_groups()
    return was_alive, work.is_alive()


def test_the_end_waits_for_threads_that_want_to_run() -> None:
    """With a fixed moment Python was gone before them, and the process aborted."""
    assert run_ranks(_busy_at_the_end, 1) == [(True, False)]


def _where_the_store_is(rank: int, world_size: int) -> str:
    return str(dist.distributed_c10d._get_default_store().underlying_store.path)


def test_ranks_keep_their_stores_files_until_they_end() -> None:
    """A FileStore whose file goes while it ends, as a group's last thread may let it, ends the process."""
    pool = RankPool(1)
    try:
        paths = [Path(pool.run(_where_the_store_is)[0]) for _ in range(2)]
        assert paths[0] != paths[1] and all(path.parent.exists() for path in paths)
    finally:
        pool.close()
    assert not paths[0].parent.exists()


def _power_sgd(rank: int, world_size: int) -> None:
    """Ends right after a backward whose hook's callbacks hold the group."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

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


def _looked_at_after_the_end(rank: int, world_size: int) -> tuple[str, list[str], bool]:
    """As a handler of the program's does that runs after minddp's."""
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    ddp._minddp_let_go()
    ddp._clear_grad_buffer()
    return str(ddp.device), sorted(ddp.state_dict()), ddp.process_group is None


def test_a_wrapper_that_was_given_up_can_be_looked_at() -> None:
    [seen] = run_ranks(_looked_at_after_the_end, 1)
    assert seen == ("cpu", ["module.bias", "module.weight"], True)
