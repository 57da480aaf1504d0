"""``on_straggler=``: every 20 synchronized steps the ranks compare their own work, in one small exchange."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any

from ..ranks.messages import gather_objects
from .diagnosis import Straggler, find_straggler, typical
from .exchange import StampedReducer
from .parts import PHASES, own_phases

__all__ = ["EVERY", "StragglerWatch"]

log = logging.getLogger("minddp")

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

    def look(self, iteration: int, reducer: StampedReducer, group: Any) -> None:
        """Compares the window that ends with ``iteration``. Collective.

        Raises:
            Exception: what the callback raises.
        """
        begin, self._seen = self._seen, iteration
        steps = [s for s in reducer.recent_steps(EVERY) if s["iteration"] > begin and s["previous_end_ns"] >= 0]
        on_host = not any(bucket.get("on_device", False) for step in steps for bucket in step["buckets"])
        found = find_in_window(gather_objects(_summary(steps) if on_host else _summary([]), group))
        if found is None:
            return
        if group.rank() == 0:
            log.warning("[rank 0] iterations %d to %d: %s", begin + 1, iteration, found)
        self._callback(found)


def _summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """In microseconds, and few of them: the rank's own work by step, the median step, the typical time by phase."""
    phases = [own_phases(step) for step in steps]
    own = [round(sum(row.values()) * 1e6) for row in phases]
    lengths = [(step["finalize_end_ns"] - step["previous_end_ns"]) // 1000 for step in steps]
    return {
        "first": steps[0]["iteration"] if steps else 0,
        "own": own,
        "step": round(statistics.median(lengths)) if lengths else 0,
        "phases": [round(typical([row[p] for row in phases]) * 1e6) if phases else 0 for p in PHASES],
    }


def find_in_window(everyone: list[dict[str, Any]]) -> Straggler | None:
    """Who is late in a window, from all ranks' summaries."""
    if any(not theirs["own"] for theirs in everyone):
        return None
    first = max(theirs["first"] for theirs in everyone)
    own = [[us * 1e-6 for us in theirs["own"][first - theirs["first"] :]] for theirs in everyone]
    length = min(map(len, own))
    phases = [{p: us * 1e-6 for p, us in zip(PHASES, theirs["phases"], strict=True)} for theirs in everyone]
    step = statistics.median(theirs["step"] for theirs in everyone) * 1e-6
    return find_straggler([row[:length] for row in own], step, phases)
