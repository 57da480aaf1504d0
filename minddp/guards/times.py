"""How long the guards wait. All of it is counted in looks, of a second each; tests make looks shorter, here alone.

==============================  ============================================================
what                            in looks
==============================  ============================================================
a waiting rank looks            1
it logs whom it waits for       after 10, 60, 120, 240, ...: each time that the wait has doubled
a rank looks for questions      1, more where there are more than 33 ranks (``reports.py``)
gone                            5, until what it had sent must have arrived, and three turns of the watchdog, until
                                where the others are was asked anew
a failed collective is named    within 5
a rank counts as waiting        for 10 after its last look
==============================  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _C

look = 1.0  # seconds
SETTLED, ANEW, NAMING, FRESH = 5, 3, 5, 10


def set_look(seconds: float) -> None:
    """In wrappers that are made from now on: for tests."""
    global look
    look = seconds
    _C.set_look_seconds(seconds)


@contextmanager
def faster(seconds: float) -> Iterator[None]:
    """:func:`set_look`, inside."""
    before = look
    set_look(seconds)
    try:
        yield
    finally:
        set_look(before)


def warning_is_due(seconds: float) -> bool:
    """Of a wait that has lasted so long. Asked once a look."""
    looks = round(seconds / look)
    minutes, rest = divmod(looks, 60)
    return looks == 10 or (rest == 0 and minutes > 0 and minutes & (minutes - 1) == 0)
