"""Where a step's time goes: seconds, traces of all ranks, tables and pictures.

Here: ``minddp.last_step``'s seconds (``step_times``), recording (``recording``, ``gathering``), the file
(``chrome``), what ``minddp timeline`` makes of it (``reader``, ``picture``), and how ranks ask the process group's
store (``store``). Not here: the stamps themselves (C++), who is late (``straggler``).
"""

from .picture import draw
from .reader import RankStep, TraceFileError, load, main, rank_steps, table
from .recording import Trace, trace
from .step_times import BucketTimes, StepTimes, step_times

__all__ = [
    "BucketTimes",
    "RankStep",
    "StepTimes",
    "Trace",
    "TraceFileError",
    "draw",
    "load",
    "main",
    "rank_steps",
    "step_times",
    "table",
    "trace",
]
