"""``on_straggler=`` of one wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import events
from .watch import StragglerWatch


class StragglerObserver(events.Observer):
    """Compares the ranks' steps now and then."""

    name = "straggler"
    options = {"on_straggler": None}
    arguments = """
        on_straggler: called on every rank with a :class:`minddp.straggler.Straggler` after each 20 synchronized steps
            in which the same rank held the others up; rank 0 logs it. The ranks meet for it. CPU only.
    """

    def __init__(self, ddp: Any, settings: Any):
        super().__init__(ddp, settings)
        self._watch = None if settings is None else StragglerWatch(settings)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Any:
        callback = values["on_straggler"]
        if callback is not None and not callable(callback):
            raise TypeError(f"on_straggler must be a callable, or None, got {callback!r}")
        return callback

    def listens(self, event: str) -> bool:
        return self.settings is not None or event == "compared"

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        return {"on_straggler": None if self.settings is None else "given"}

    def before_forward(self, joining: bool) -> None:
        averager = self.averager
        iteration = averager.reducer.iteration()
        if self._watch is not None and not joining and self._watch.is_due(iteration):
            with averager.observers.together():
                self._watch.look(iteration, averager.reducer, averager.group)


OBSERVER = StragglerObserver
