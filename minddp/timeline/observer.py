"""When stamps of one wrapper begin, and when an open trace looks at them."""

from __future__ import annotations

from typing import Any

from .. import events
from .._C import timeline as cases
from ..guards import step
from ..reducer import Plan
from . import recording


class Stamps(cases.Stamps):
    """The stamps of the last steps, which the reducer takes.

    Args:
        on_device: a device runs the steps, and stamps are the host's, which enqueues them.
    """

    def __init__(self, on_device: bool):
        super().__init__()
        self._on_device = on_device

    def last_step(self) -> dict[str, Any]:
        """Stamps of the last synchronized step, in nanoseconds. On a device a bucket has ``on_device=True``."""
        return self._marked(super().last_step())

    def recent_steps(self, at_most: int = 32) -> list[dict[str, Any]]:
        """The same of the last synchronized steps that have ended with these buckets, oldest first; 32 are kept. Only
        the newest has ``ready_ns``, and its buckets ``parameters``."""
        return [self._marked(step) for step in super().recent_steps(at_most)]

    def _marked(self, step: dict[str, Any]) -> dict[str, Any]:
        for bucket in step["buckets"] if self._on_device else ():
            bucket["on_device"] = True
        return step


class Timeline(events.Observer):
    """Marks where a step begins, and keeps each step of an open trace."""

    name = "timeline"

    def planning(self, plan: Plan) -> None:
        self._stamps = Stamps(plan.device.type != "cpu")
        plan.add(self._stamps)

    def entering(self) -> None:
        self._stamps.arrive(step.spent_ns())

    def before_forward(self, joining: bool) -> None:
        if recording.active:
            recording.after_step(self.averager)


OBSERVER = Timeline
