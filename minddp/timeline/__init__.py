"""Where a step's time goes: seconds, traces of all ranks, tables and pictures. Uses guards, planner.

Here: ``minddp.last_step``'s seconds (``step_times``), recording (``recording``, ``gathering``), the file
(``chrome``), tables and pictures (``report``; ``minddp timeline`` is the command). Not here: the stamps themselves
(C++), what is planned from them (``planner``).
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
