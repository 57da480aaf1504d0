"""Which rank holds the others up: ``minddp.report`` and ``minddp report``. Uses timeline.

Here: a step cut into parts (``parts``), who is to blame (``diagnosis``), the report and its words (``result``): all
of it pure, without ranks and clocks. Then what ranks exchange (``exchange``), and the command (``command``). Not
here: the stamps themselves, and how ranks ask the store (``timeline``).
"""

from .diagnosis import Straggler
from .exchange import report
from .parts import RankTimes
from .result import Report

__all__ = ["RankTimes", "Report", "Straggler", "report"]
