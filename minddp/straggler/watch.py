"""``on_straggler=``: every 20 synchronized steps the ranks compare their own work, in one small exchange."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..logs import log
from ..messages import gather_objects
from ..timeline.step_times import Stamps, on_device
from .diagnosis import Straggler, find_straggler
from .parts import PHASES, own_phases

__all__ = ["EVERY", "StragglerWatch", "find_in_window"]


EVERY = 20  # steps


class StragglerWatch:
    """Of one wrapper: looks at each window of steps, and calls ``callback`` on every rank where a rank is late.

    Steps are counted, clocks never decide: all ranks look between the same two steps.
    """

    def __init__(self, callback: Callable[[Straggler], Any]):
        self._callback = callback
        self._seen = 0

    def is_due(self, iteration: int) -> bool:
        """Whether a window ends with this iteration. One that was numbered anew begins a window."""
        if iteration < self._seen:
            self._seen = iteration
        return iteration - self._seen >= EVERY

    def look(self, iteration: int, reducer: Any, group: Any) -> None:
        """Compares the window that ends with ``iteration``. Collective.

        Raises:
            Exception: what the callback raises.
        """
        begin, self._seen = self._seen, iteration
        steps = [s for s in reducer.recent_steps(EVERY) if s["iteration"] > begin and s["previous_end_ns"] >= 0]
        summary = {} if any(map(on_device, steps)) else {step["iteration"]: _summary(step) for step in steps}
        found = find_in_window(gather_objects(summary, group))
        if found is None:
            return
        if group.rank() == 0:
            log.warning("[rank 0] iterations %d to %d: %s", begin + 1, iteration, found)
        self._callback(found)


def _summary(step: Stamps) -> list[int]:
    """In microseconds: the step, and the rank's own work by phase."""
    own = own_phases(step)
    return [(step["finalize_end_ns"] - step["previous_end_ns"]) // 1000, *(round(own[p] * 1e6) for p in PHASES)]


def find_in_window(everyone: Sequence[dict[str, list[int]]]) -> Straggler | None:
    """Who is late in a window, from all ranks' summaries by iteration."""
    common = sorted(set.intersection(*map(set, everyone)), key=int)
    if not common:
        return None
    own = [[dict(zip(PHASES, (us * 1e-6 for us in theirs[i][1:]))) for i in common] for theirs in everyone]
    return find_straggler(own, statistics.median(theirs[i][0] for theirs in everyone for i in common) * 1e-6)
