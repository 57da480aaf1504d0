"""Odd names, hidden processes, no more threads, a prompt: a program that trains with torch's class goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp import environment, lifetime
from minddp.guards import processes, times
from tests.on_ranks import on_ranks

_SET_NAME = 15  # prctl(2)


@on_ranks(2)
def test_a_name_may_be_any_bytes(rank: int, world_size: int) -> None:
    """The kernel cuts a name to 15 bytes, in the middle of a character too."""
    ctypes.CDLL(None).prctl(_SET_NAME, "ааааааааа".encode()[:15])
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    busy = threading.Thread(target=lambda: sum(range(10**7)))  # the program's own: the end does not wait for it
    busy.start()
    assert str(busy.native_id) not in dict(lifetime._running())
    busy.join()
    assert processes.here().started
    assert processes.look(processes.here()).state == "running"


@pytest.mark.parametrize(("error", "state"), [(PermissionError, "elsewhere"), (ProcessLookupError, "gone")])
def test_what_proc_hides_is_not_gone(monkeypatch: pytest.MonkeyPatch, error: type[OSError], state: str) -> None:
    def refuse(*_: object) -> None:
        raise error

    def nothing(_: object) -> None:
        raise FileNotFoundError

    seen = processes.here()
    monkeypatch.setattr(processes, "_stat", nothing)
    monkeypatch.setattr(os, "kill", refuse)
    assert processes.look(seen).state == state


def test_another_namespaces_proc_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else readlink(path))
    assert processes.look(processes.here()).state == "elsewhere"


def test_a_process_whose_first_thread_has_ended_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel calls it a zombie then."""
    seen, stat = processes.here(), processes._stat
    monkeypatch.setattr(processes, "_stat", lambda of: ["Z", *stat(of)[1:]])
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        assert processes.look(seen).state == "running"
    finally:
        ends.set()
        thread.join()


@on_ranks(2)
def test_a_program_may_join_all_threads(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("minddp")]
    for thread in ours:
        thread.join()
    assert ours


@on_ranks(2)
@times.faster(0.2)
def test_a_signal_handler_may_compute_gradients_while_backward_waits(rank: int, world_size: int) -> None:
    """Rank 1 comes late; meanwhile a handler of rank 0's runs, and computes a gradient."""
    ddp, found = minddp.DistributedDataParallel(nn.Linear(2, 2)), []

    def handle(*_: object) -> None:
        x = torch.ones(2, requires_grad=True)
        (x * 3).sum().backward()
        found.append(bool((x.grad == 3).all()))

    signal.signal(signal.SIGALRM, handle)
    try:
        for i in range(2):
            loss = ddp(torch.ones(1, 2)).sum()
            if i and rank:
                time.sleep(0.7)
            if i and not rank:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            loss.backward()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert found == ([] if rank else [True])


@on_ranks(2)
def test_without_a_watchdog(rank: int, world_size: int) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start, threading.Thread.start = threading.Thread.start, refuse  # type: ignore[method-assign]
    try:
        ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
        ddp(torch.full((1, 2), float(rank))).sum().backward()
        dist.destroy_process_group()
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    torch.testing.assert_close(ddp.module.weight.grad, torch.full((2, 2), 0.5))


def test_an_exception_before_a_prompt_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -i``: the script has ended with an exception, and its user goes on."""
    monkeypatch.delenv("PYTHONINSPECT", raising=False)
    assert not environment.prompts()
    monkeypatch.setenv("PYTHONINSPECT", "1")
    assert environment.prompts()
