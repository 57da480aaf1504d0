"""Programs in which one rank is slow, in one way or another, and which torch's class trains to the end."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.guards import local_gradients, stall_inspector
from minddp.guards.whereabouts import Progress
from minddp.testing import run_ranks

TIMEOUT, LONGER = 2, 8.0  # the wrappers'; how long one rank is slow


class Slow(nn.Module):
    """``work`` runs in the next forward, once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.work = None

    def forward(self, x):
        work, self.work = self.work, None
        if work is not None:
            work()
        return self.layer(x)


def _wrapped(module=None, desync_timeout=TIMEOUT, **kwargs):
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(module or Slow(), desync_timeout=desync_timeout, **kwargs)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


def _train(ddp, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def _compute(seconds=LONGER):
    """On one line of the program, always the same."""
    ones, end = torch.ones(200, 200), time.monotonic() + seconds
    while time.monotonic() < end: ones.mm(ones)  # noqa: E701


def _moves(rank):
    """A forward that computes; then a backward whose gradients come slowly, on a rank that is late for it."""
    ddp, optimizer = _wrapped()
    _train(ddp, optimizer, 2)
    if rank == 1:
        ddp.module.work = _compute
    _train(ddp, optimizer)
    handles = [p.register_hook(lambda grad: time.sleep(1.5 * (rank == 1))) for p in ddp.parameters()]
    time.sleep(TIMEOUT * (rank == 1))
    _train(ddp, optimizer)
    for handle in handles:
        handle.remove()
    _train(ddp, optimizer)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.one(x).sum(), self.two(x).sum()


def _rests_between_two_backwards(rank):
    """Of one iteration, each over one half of the outputs."""
    ddp, optimizer = _wrapped(Two())
    for step in range(4):
        optimizer.zero_grad()
        one, two = ddp(torch.ones(2, 4))
        one.backward()
        if rank == 1 and step == 2:
            time.sleep(LONGER)
        two.backward()
        optimizer.step()


def _after(seconds, signals):
    """Signals to this process from another, with pauses between."""
    subprocess.Popen(["sh", "-c", "; ".join(f"sleep {s}; kill -{n} {os.getpid()}" for s, n in zip(seconds, signals))])


def _is_stopped_for_a_moment(rank):
    """As by a debugger that takes a look, while the others have waited for long."""
    ddp, optimizer = _wrapped(desync_timeout=3)
    _train(ddp, optimizer, 2)
    if rank == 1:
        _after([4, 1], ["STOP", "CONT"])
        time.sleep(7)
    _train(ddp, optimizer)


def _shows_an_exception(rank):
    """With ``sys.excepthook``, as a console does, and goes on."""
    ddp, optimizer = _wrapped()
    _train(ddp, optimizer, 2)
    if rank == 1:
        lines = "try:", "    raise ValueError", "except ValueError:", "    sys.excepthook(*sys.exc_info())"
        exec(compile("\n".join(lines), "<console>", "exec"))
        time.sleep(LONGER)
    _train(ddp, optimizer)


def _is_interrupted_in_forward(rank):
    """By Ctrl-C, on each rank; rank 1 then saves what it has."""
    ddp, optimizer = _wrapped()
    _train(ddp, optimizer, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    ddp.module.work = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _train(ddp, optimizer)
    time.sleep(LONGER * (rank == 1))
    _train(ddp, optimizer)


def _in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _threads_end(rank):
    """One that has trained ends by ``sys.exit()``, and later ones, that have its number, by an exception."""
    ddp, optimizer = _wrapped()
    _in_thread(lambda: (_train(ddp, optimizer, 2), sys.exit()))
    time.sleep(LONGER * (rank == 1))
    _train(ddp, optimizer)
    if rank == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                _in_thread(lambda: [][0])
        time.sleep(LONGER)
    _train(ddp, optimizer)


def _steps_raise(rank):
    """On every rank, which all catch; rank 1 then writes a report."""
    ddp, optimizer = _wrapped()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        _train(ddp, optimizer)
    handle.remove()
    time.sleep(LONGER * (rank == 1))
    _train(ddp, optimizer, 2)


def _steps_late(rank):
    """On gradients that all ranks have made alike, past the wrapper."""
    ddp, optimizer = _wrapped()
    _train(ddp, optimizer)
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    sum(p.square().sum() for p in ddp.module.parameters()).backward()
    time.sleep(LONGER * (rank == 1))
    optimizer.step()
    _train(ddp, optimizer)


def _makes_one_that_only_warns(rank):
    """While no wrapper is there whose patience the constructor could have."""
    _train(*_wrapped(desync_timeout=None))
    if rank == 1:
        _after([LONGER], ["CONT"])
        signal.raise_signal(signal.SIGSTOP)
    _train(*_wrapped(desync_timeout=None))


PROGRAMS = [
    _moves, _rests_between_two_backwards, _is_stopped_for_a_moment, _shows_an_exception, _is_interrupted_in_forward,
    _threads_end, _steps_raise, _steps_late, _makes_one_that_only_warns,
]  # fmt: skip


def _run(rank, world_size, program):
    """Ranks run other tests afterwards: what a program is told here is forgotten with it.

    Patience is less than ``LONGER``, and more than ``Watchdog.patience``, in which a rank that can answer does.
    """
    with (
        mock.patch.object(local_gradients, "PATIENCE_SECONDS", 6.0),
        mock.patch.object(stall_inspector, "DEFAULT_DESYNC_TIMEOUT", TIMEOUT),
    ):
        program(rank)
    return True


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.__name__.strip("_") for program in PROGRAMS])
def test_nobody_is_given_up(program):
    assert run_ranks(_run, 2, program, timeout=60) == [True] * 2


def _last_buffers(rank, world_size):
    """Rank 1 has what it needs and goes; rank 2 comes later than a rank that is gone is waited for."""
    ddp, optimizer = _wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), desync_timeout=30)
    _train(ddp, optimizer, 2)
    time.sleep(10 * (rank == 2))
    ddp.eval()
    ddp(torch.ones(2, 4))
    if rank == 1:
        minddp.guards.watchdog.current(dist.group.WORLD).end()
    time.sleep(11 * (rank == 1))
    return True


def test_who_has_done_its_part_may_go():
    assert run_ranks(_last_buffers, 3, timeout=60) == [True] * 3


def test_computing_is_progress(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()
    rests = []
    for seen, used in [("a", 5.0), ("a", 5.0), ("a", 7.0), ("a", 7.1), ("b", 7.1), ("b", 7.2)]:
        now[0] += 2.0
        rests.append(progress.rests(seen, used))
    assert rests == [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]
