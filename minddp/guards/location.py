"""Where this process's program is: its innermost line, and the collective that it is in.

A thread is looked at from outside, by another one: it costs the program nothing, and keeps nothing of it.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import types
from pathlib import Path

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
# A program may lie below /usr, as Python does there.
_NOT_THE_PROGRAMS = ("/site-packages/", "/dist-packages/", "<", str(Path(__file__).parents[1]) + "/")
_STANDARD_LIBRARY = str(Path(threading.__file__).parent) + "/"


def _frames() -> dict[int, types.FrameType]:
    """Each thread's innermost frame.

    Python holds a lock of its own meanwhile, for which a thread that ends waits with the GIL held. A finalizer that
    garbage collection ran here, and that released the GIL, would stop the process.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def of_thread(thread: threading.Thread) -> str:
    """ "at train.py:3 in f, in torch.distributed's barrier"."""
    frame: types.FrameType | None = _frames().get(thread.ident or 0) if thread.is_alive() else None
    line = collective = ""
    while frame is not None and not line:
        name = frame.f_code.co_filename
        if name.endswith(_COLLECTIVES):
            collective = f"in torch.distributed's {frame.f_code.co_name}"
        elif _is_users(name):
            line = f"at {_short(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ", ".join(filter(None, (line, collective)))


def _is_users(filename: str) -> bool:
    return not filename.startswith(_STANDARD_LIBRARY) and not any(part in filename for part in _NOT_THE_PROGRAMS)


def exception_text(error: BaseException) -> str:
    """The error's type, its text and the line that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({_short(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _short(filename: str) -> str:
    return "/".join(filename.split("/")[-2:])
