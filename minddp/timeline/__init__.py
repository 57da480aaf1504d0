"""Where a step's time goes: stamps turned into seconds, traces of all ranks, and what is drawn from them.

Here: ``minddp.last_step``'s seconds (``step_times``), recording (``recording``, ``gathering``), the file
(``chrome``), tables and pictures (``report``; ``minddp timeline`` is the command). May import from ``guards`` and
below. Not here: the stamps themselves (csrc/support/trace.h), what is planned from them (``planner``).
"""

from .recording import Trace, trace
from .report import RankStep, TraceFileError, clocks, draw, load, main, rank_steps, table
from .step_times import BucketTimes, StepTimes, step_times

__all__ = [
    "BucketTimes",
    "RankStep",
    "StepTimes",
    "Trace",
    "TraceFileError",
    "clocks",
    "draw",
    "load",
    "main",
    "rank_steps",
    "step_times",
    "table",
    "trace",
]
