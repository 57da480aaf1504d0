"""Who is slow: ``minddp.report``, ``on_straggler=`` and ``minddp report``. Uses guards, timeline.

Here: a step cut into parts (``parts``), who is to blame (``diagnosis``), the report and its words (``result``): all
of it pure, without ranks and clocks. Then what ranks exchange (``exchange``, ``links``, ``watch``), and the command
(``command``). Not here: the stamps themselves (C++), the step drawn bucket by bucket (``timeline``).
"""

from .diagnosis import SlowLink, Straggler
from .exchange import report
from .parts import RankTimes
from .result import Report

__all__ = ["RankTimes", "Report", "SlowLink", "Straggler", "report"]
