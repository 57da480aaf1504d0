"""When stamps of one wrapper begin, and when an open trace looks at them."""

from __future__ import annotations

from .. import events
from ..guards import step
from . import recording


class Timeline(events.Observer):
    """Marks where a step begins, and keeps each step of an open trace."""

    name = "timeline"

    def entering(self) -> None:
        self.averager.reducer.arrive(step.spent_ns())

    def before_forward(self, joining: bool) -> None:
        if recording.active:
            recording.after_step(self.averager)


OBSERVER = Timeline
