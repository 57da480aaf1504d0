"""How long the guards wait. All of it is counted in looks, of a second each; tests make looks shorter, here alone.

==============================  ============================================================
what                            in looks
==============================  ============================================================
a waiting rank looks            1
one rank calls the others       after 10, 60, 120, 240, ...
a rank is gone, or has left     5, until what it had sent must have arrived; then one calls
a call has a result             after 2 and a half, more where there are more than 2,000 ranks (``roll.py``)
a failed collective is named    within 5
a rank counts as waiting        for 10 after its last look; it calls no more after 3
==============================  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _C

look = 1.0  # seconds
SETTLED, NAMING, FRESH, RECENT = 5, 5, 10, 3


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


def warnings_due(seconds: float) -> int:
    """How many, of a wait that has lasted so long."""
    looks = round(seconds / look)
    return 0 if looks < 10 else 1 + (looks // 60).bit_length()
