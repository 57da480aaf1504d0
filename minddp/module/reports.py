"""What the wrapper tells of its steps: the last one, and all ranks' last ones compared."""

from __future__ import annotations

from typing import Any

import torch

from ..straggler.exchange import collect
from ..straggler.result import Report
from ..timeline import StepTimes, step_times


class Reports:
    """The part of :class:`DistributedDataParallel` that says where time goes."""

    process_group: Any
    device: torch.device
    reducer: Any
    _minddp_engine: Any

    def last_step(self) -> StepTimes:
        """Where the last synchronized backward's time went, in seconds, bucket by bucket.

        Cheap enough to call in every step; the raw stamps are ``ddp.reducer.last_step()``.
        """
        return step_times(self.reducer.last_step())

    def report(self, steps: int = 20, *, probe: bool = True) -> Report:
        """Which rank holds the others up, and in what; what of communication backward hides; what would help.

        Collective: call it on all ranks at the same point between two steps, with the same arguments. ``print()`` of
        what it returns is a table with sentences. Ranks are numbered as in the wrapper's process group.

        Args:
            steps: of the last so many synchronized steps, 1 to 32. Fewer than 8 name nobody. New buckets (after the
                first step, while ``"auto"`` measures) begin anew.
            probe: measure the links by short messages, with three ranks or more, and lone allreduces, which the
                predictions need; takes a second or so. CPU only.

        Returns:
            The same report on every rank, in seconds.

        Raises:
            TypeError, ValueError: an argument makes no sense, or differs between ranks; on every rank.
            RuntimeError: no step that has another before it has ended on all ranks; every parameter is delayed.
        """
        engine = self._minddp_engine
        if engine is None:
            raise RuntimeError(
                "report: every parameter's reduction is delayed: there are no steps of buckets to tell of"
            )
        with engine.collective():
            arguments = {"steps": steps, "probe": probe}
            return collect(engine.reducer, self.process_group, arguments, engine.gradients(), self.device)
