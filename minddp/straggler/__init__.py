"""Who is slow, and what would help: the answer of ``minddp.report(ddp)``, ``on_straggler=`` and ``minddp report``.

Here: a step cut into parts (``parts``, ``intervals``), who is to blame (``diagnosis``), what the planner predicts
(``advice``), the report and its text (``findings``, ``result``, ``text``, ``picture``): all of it pure, without ranks
and clocks. Then what ranks exchange (``exchange``, ``probe``, ``watch``), and the command (``command``). May import
from ``timeline``, ``planner``, ``guards`` and below. Not here: the stamps themselves (csrc/support/trace.h), the step
drawn bucket by bucket (``timeline``).
"""

from .advice import Advice, Prediction
from .diagnosis import SlowLink, Straggler
from .findings import RankTimes
from .result import Report

__all__ = ["Advice", "Prediction", "RankTimes", "Report", "SlowLink", "Straggler"]
