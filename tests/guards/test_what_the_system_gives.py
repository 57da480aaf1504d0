"""Odd names, hidden processes, no more threads, a prompt: a program that trains with torch's class goes on."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp import environment
from minddp.guards import lifetime
from minddp.ranks import processes
from minddp.testing import run_ranks

_SET_NAME = 15  # prctl(2)


def _with_odd_names(rank: int, world_size: int) -> str:
    """The kernel cuts a name to 15 bytes, in the middle of a character too."""
    ctypes.CDLL(None).prctl(_SET_NAME, "ааааааааа".encode()[:15])
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    lifetime._others_run()
    assert processes.here().started and processes.thread_state(threading.get_native_id())[0]
    return processes.look(processes.here()).state


def test_a_name_may_be_any_bytes() -> None:
    assert run_ranks(_with_odd_names, 2) == ["running"] * 2


@pytest.mark.parametrize(("error", "state"), [(PermissionError, "elsewhere"), (ProcessLookupError, "gone")])
def test_what_proc_hides_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError], state: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    def nothing(_: object) -> None:
        raise FileNotFoundError

    seen = processes.here()
    monkeypatch.setattr(processes, "_stat", nothing)
    monkeypatch.setattr(os, "kill", refuse)
    assert processes.look(seen).state == state


def _without_threads(rank: int, world_size: int) -> torch.Tensor:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start, threading.Thread.start = threading.Thread.start, refuse  # type: ignore[method-assign]
    try:
        ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
        ddp(torch.full((1, 2), float(rank))).sum().backward()
        dist.destroy_process_group()
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    return ddp.module.weight.grad


def test_without_a_watchdog() -> None:
    for grad in run_ranks(_without_threads, 2):
        torch.testing.assert_close(grad, torch.full((2, 2), 0.5))


def test_an_exception_before_a_prompt_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -i``: the script has ended with an exception, and its user goes on."""
    monkeypatch.delenv("PYTHONINSPECT", raising=False)
    assert not environment.prompts()
    monkeypatch.setenv("PYTHONINSPECT", "1")
    assert environment.prompts()
