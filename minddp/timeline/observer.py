"""When stamps of one wrapper begin, and when an open trace looks at them."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import events
from . import recording


class _OptimizerTime:
    """How long optimizers' steps have taken since the first wrapper was made. A step within a step is counted once.
    One that an exception ends, or in which a forward runs, is not counted."""

    def __init__(self) -> None:
        self._depth = self._begun_ns = self._spent_ns = 0

    def begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled step calls nobody
            return
        self._depth += 1
        if self._depth == 1:
            self._begun_ns = time.monotonic_ns()

    def end(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._depth == 1:
            self._spent_ns += time.monotonic_ns() - self._begun_ns
        self._depth = max(0, self._depth - 1)

    def at_forward(self) -> int:
        """Nanoseconds so far. A forward begins: what has not ended is given up."""
        self._depth = 0
        return self._spent_ns


@functools.cache
def optimizer_time() -> _OptimizerTime:
    """The process's, which torch's hooks on all optimizers tell."""
    time_of_all = _OptimizerTime()
    register_optimizer_step_pre_hook(time_of_all.begin)
    register_optimizer_step_post_hook(time_of_all.end)
    return time_of_all


class Timeline(events.Observer):
    """Marks where a step begins, and keeps each step of an open trace.

    Attributes:
        key: what all ranks call the wrapper and its reducer, for a report; ``None``: nothing yet.
        keys: what this rank has written for the last report.
    """

    name = "timeline"
    left = {"on_straggler": "Call minddp.report(ddp) every 20 steps or so: docs/report.md shows how."}

    def __init__(self, ddp: Any, settings: Any):
        super().__init__(ddp, settings)
        self.key: str | None = None
        self.keys: list[str] = []
        self._token, self._reducers = "", 0
        self._optimizers = optimizer_time()

    def named(self, token: str) -> None:
        self._token = token
        self.key = f"{token}.{self._reducers}"

    def reducer_made(self, reducer: Any, before: Any) -> None:
        self._stamps = self.averager.stamps
        self._reducers += 1  # each of them numbers its iterations anew
        if self._token:
            self.named(self._token)

    def entering(self) -> None:
        self._stamps.arrive(self._optimizers.at_forward())

    def before_forward(self, joining: bool) -> None:
        if recording.active:
            recording.after_step(self.averager)


OBSERVER = Timeline
