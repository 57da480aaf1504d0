"""Where this process's program is: its innermost line, the collective it is in, and whether it moves.

Looks at threads from outside, on a thread of the watchdog's: it costs the program nothing, and keeps nothing of it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..ranks.processes import thread_seconds

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_INSIDE = ("/minddp/module/distributed.py", "/torch/autograd/graph.py")  # forward; autograd's engine, called
_OURS = ("/minddp/guards/", "/minddp/module/", "/minddp/ranks/", "/minddp/reduction/", "/minddp/functional/")
_NOT_THE_PROGRAMS = ("/site-packages/", "<", "/minddp/sync_batchnorm.py", *_OURS)


class Progress:
    """Since when nothing has changed, as far as can be seen from outside."""

    # Of one processor: who waits, and looks now and then whether it is over, uses less.
    COMPUTES = 0.1

    def __init__(self) -> None:
        self._seen: Any = None
        self._looked = self._since = time.monotonic()
        self._used = 0.0

    def rests(self, seen: Any, used: float) -> float:
        """Seconds for which ``seen`` has been the same, and those who train have computed next to nothing.

        ``used``: the processor time of all these threads, in seconds.
        """
        now = time.monotonic()
        computes = used - self._used > self.COMPUTES * (now - self._looked)
        if seen != self._seen or computes:
            self._seen, self._since = seen, now
        self._looked, self._used = now, used
        return now - self._since


def training_threads(trains: dict[threading.Thread, float]) -> tuple[str, str, bool, Any, float]:
    """Where the thread that ran the last forward is, all stacks of those that have run one, and their processor time.

    The first is its innermost line of the program, the collective of torch's that it is in, and whether it is inside
    of a wrapper's forward, or of a backward. Before any forward, and where these threads are gone, the main thread
    stands for them.
    """
    frames = sys._current_frames()
    threads = [thread for thread in list(trains) if thread.is_alive() and thread.ident in frames]
    threads.sort(key=lambda thread: trains[thread], reverse=True)
    threads = threads or [threading.main_thread()]
    found = [_position(frames.get(thread.ident or 0)) for thread in threads]
    frames.clear()  # this one's is among them, and holds them: in a circle, which keeps what the program's hold
    inside = any(name.endswith(_INSIDE) for name, _ in found[0][2])
    stacks = [stack for _, _, stack in found]
    used = sum(thread_seconds(thread.native_id or 0) for thread in threads)
    return *found[0][:2], inside, (stacks, _collectives_so_far()), used


def _position(frame: types.FrameType | None) -> tuple[str, str, list[tuple[str, int]]]:
    line, collective, stack = "", "", []
    while frame is not None:
        name = frame.f_code.co_filename
        stack.append((name, frame.f_lineno))
        if not line and name.endswith(_COLLECTIVES):
            collective = frame.f_code.co_name
        if not line and _is_users(name):
            line = f"{_short(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return line, collective, stack


def _collectives_so_far() -> int:
    """Of all groups: whoever runs collectives does not stand still."""
    total = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):  # not every backend counts
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def _is_users(filename: str) -> bool:
    return not filename.startswith(sys.base_prefix) and not any(part in filename for part in _NOT_THE_PROGRAMS)


def exception_text(error: BaseException) -> str:
    """Type, text and the line of the program that raised."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({_short(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _short(filename: str) -> str:
    return "/".join(filename.split("/")[-2:])
