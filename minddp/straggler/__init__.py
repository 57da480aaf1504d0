"""Who is slow: the answer of :func:`minddp.report`, of ``on_straggler=`` and of ``minddp report``.

Here: a step cut into parts (``parts``), who is to blame (``diagnosis``), the report and its words (``result``): all
of it pure, without ranks and clocks. Then what ranks exchange (``exchange``, ``links``, ``watch``), and the command
(``command``). May import from ``timeline``, ``guards`` and below. Not here: the stamps themselves
(csrc/support/trace.h), the step drawn bucket by bucket (``timeline``).
"""

from .diagnosis import SlowLink, Straggler
from .exchange import report
from .parts import RankTimes
from .result import Report

__all__ = ["RankTimes", "Report", "SlowLink", "Straggler", "report"]
