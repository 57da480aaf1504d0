"""Where this process's program is: its innermost line, the collective that it is in, and what its thread does.

A thread is looked at from outside, by another one: it costs the program nothing, and keeps nothing of it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
from pathlib import Path

from .processes import thread_state

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_NOT_THE_PROGRAMS = ("/site-packages/", "<", str(Path(__file__).parents[1]) + "/")
_COMPUTES = 0.1  # of one processor: who waits, and looks now and then whether it is over, uses less


class Activity:
    """Whether a thread computes, between one look at it and the next. It warns nobody and ends nothing."""

    def __init__(self) -> None:
        self._looked, self._used = time.monotonic(), 0.0

    def __call__(self, native_id: int) -> str:
        """ "computes", "sleeps or waits", or "waits for a disk"; empty where nobody can tell.

        ``native_id``: the kernel's, as the thread itself knows it; after a fork Python's ``Thread`` has its parent's.
        """
        state, used = thread_state(native_id)
        now = time.monotonic()
        computes = state == "R" or used - self._used > _COMPUTES * (now - self._looked)
        self._looked, self._used = now, used
        return "computes" if computes else {"S": "sleeps or waits", "D": "waits for a disk"}.get(state, "")


def of_thread(thread: threading.Thread) -> tuple[str, str]:
    """Its innermost line of the program, and the collective of torch's that it is in."""
    frame: types.FrameType | None = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    collective = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_COLLECTIVES):
            collective = frame.f_code.co_name
        if _is_users(name):
            return f"{_short(name)}:{frame.f_lineno} in {frame.f_code.co_name}", collective
        frame = frame.f_back
    return "", collective


def _is_users(filename: str) -> bool:
    return not filename.startswith(sys.base_prefix) and not any(part in filename for part in _NOT_THE_PROGRAMS)


def exception_text(error: BaseException) -> str:
    """Type, text and the line that raised."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({_short(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _short(filename: str) -> str:
    return "/".join(filename.split("/")[-2:])
