"""Where a step's time goes: ``minddp.last_step(ddp)``, and timelines of all ranks as Chrome/Perfetto JSON.

Overview
    The reducer stamps every synchronized backward (always; a clock read per gradient and seven per
    bucket). :func:`step_times` turns one step's stamps into seconds. While a trace is open, the module
    calls :func:`after_step` at the beginning of each forward, which keeps the stamps of the step before.
    When it closes, rank 0 collects every rank's part through the process group's store and writes one
    file; ``minddp timeline`` and ``minddp report`` read it, and so do chrome://tracing and ui.perfetto.dev.

What always holds
    With no trace open, ``active`` is False and nothing here runs. Closing runs no collective and never
    waits longer than its timeout: a rank that is missing is named in the file and in the log. A file that cannot be
    written, and a store that does not answer, are logged: training goes on.

Clocks
    Stamps are CLOCK_MONOTONIC. Ranks in one boot of one kernel read the same clock. Another machine's is another one:
    the file says so, and each machine's steps begin at 0.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .. import environment, lifetime  # noqa: F401  registers its exit handler first, so that it runs after the trace's
from ..documents import path_text, refuse_device
from ..logs import log
from .chrome import write
from .gathering import Ranks
from .step_times import ended, step_begin

__all__ = ["Trace", "active", "after_step", "trace"]

active = False  # read by the module at each forward: is a trace open?

_DEFAULT_STEPS = 100
_PATIENCE = 30.0  # seconds that rank 0 awaits the others' parts
_AFTER_AN_EXCEPTION = 1.0


@dataclass
class _ModuleRecord:
    """What one wrapped module has shown so far, since its reducer was made: one made anew numbers steps and
    parameters anew, and gets a record of its own."""

    name: str
    parameter_names: list[str]
    reducer: Any  # kept, if another takes its place, until its last step is read
    earlier: int = 0  # steps in the module's records before this one
    steps: list[dict[str, Any]] = field(default_factory=list)
    last_iteration: int = 0
    dropped: int = 0

    def add(self, step: dict[str, Any], begin_ns: int, limit: int) -> None:
        """Keeps ``step`` unless it was seen before, began before the trace, or the limit is reached."""
        if step["iteration"] <= self.last_iteration or step_begin(step) < begin_ns or not ended(step):
            return
        self.last_iteration = step["iteration"]
        if self.earlier + len(self.steps) < limit:
            self.steps.append(step)
        else:
            self.dropped += 1

    def fits(self, ddp: Any) -> bool:
        """Whether the module's steps still are this record's."""
        same = self.reducer is ddp.reducer and self.parameter_names == list(ddp.parameter_names)
        return same and ddp.reducer.last_step()["iteration"] >= self.last_iteration

    def to_json(self) -> dict[str, Any]:
        facts = {"name": self.name, "parameter_names": self.parameter_names, "dropped": self.dropped}
        return {**facts, "steps": self.steps}


def path_of(path: Any) -> str:
    """The path of the file that is to be written later.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, or holds what no path does.
        OSError: its folder does not exist, or it is a folder, a device or a pipe.
    """
    text = path_text(path, "minddp.trace: path")
    if not text or "\0" in text or not _encodes(text):
        raise ValueError(f"minddp.trace: path must name a file, got {text!r}")
    folder = os.path.dirname(text) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"minddp.trace: the folder {folder!r} of path {text!r} does not exist")
    if os.path.isdir(text):
        raise IsADirectoryError(f"minddp.trace: path {text!r} is a folder; name a file in it")
    refuse_device(text, "minddp.trace: path ")
    return text


def _encodes(text: str) -> bool:
    try:
        return bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


class Trace:
    """An open trace; a context manager. Made by :func:`trace`."""

    def __init__(self, path: str | os.PathLike[str], steps: int, patience: float = _PATIENCE):
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"minddp.trace: steps must be a number of steps, got {steps!r}")
        if steps < 1:
            raise ValueError(f"minddp.trace: steps must be at least 1, not {steps}")
        self._path = path_of(path)
        self._limit = steps
        self._patience = patience
        self._records: list[_ModuleRecord] = []
        self._by_module: weakref.WeakKeyDictionary[Any, _ModuleRecord] = weakref.WeakKeyDictionary()
        self._ranks: Ranks | None = None

    def __enter__(self) -> Trace:
        global _open, active
        if _open is not None:
            raise RuntimeError(f"a trace is already open (it goes to {_open._path!r}): close it first")
        self._begin_ns = time.monotonic_ns()
        _open, active = self, True
        self._meet()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an exception the other ranks may never come: rank 0 writes what has come a second later."""
        failed = kind is not None and issubclass(kind, (Exception, KeyboardInterrupt))
        if failed:
            self._patience = min(self._patience, _AFTER_AN_EXCEPTION)
        self.close()

    def close(self) -> None:
        """Ends the trace; rank 0 writes the file. Does nothing when the trace is closed already."""
        global _open, active
        if _open is not self:
            return
        _open, active = None, False
        for ddp in list(self._by_module):
            self._look(ddp)
        for record in self._records:
            record.reducer = None
        self._meet()
        ranks = self._ranks or Ranks(self._path, alone=True)
        try:
            if parts := ranks.gather([record.to_json() for record in self._records], self._patience):
                write(self._path, parts, ranks.world_size)
        except Exception as error:  # what observes goes on
            log.warning("the trace %s could not be written: %s", self._path, error)

    def close_if_used(self) -> None:
        """Closes, but writes only if a module took a step: a helper process (a data loader's) writes none."""
        global _open, active
        if _open is self and not self._records:
            _open, active = None, False
        self.close()

    def add(self, ddp: Any) -> None:
        """Keeps ``ddp``'s last step, if it is new."""
        self._meet()
        self._look(ddp)

    def _look(self, ddp: Any) -> None:
        record = self._by_module.get(ddp)
        reducer = getattr(ddp, "reducer", None)
        if record is not None and record.reducer is not reducer:
            record.add(record.reducer.last_step(), self._begin_ns, self._limit)
        if reducer is None:  # given up when the interpreter ends
            return
        if record is None or not record.fits(ddp):
            record = self._new_record(ddp, record)
        record.add(reducer.last_step(), self._begin_ns, self._limit)

    def _new_record(self, ddp: Any, before: _ModuleRecord | None) -> _ModuleRecord:
        record = _ModuleRecord(type(ddp.module).__name__, list(ddp.parameter_names), ddp.reducer)
        if before is not None:
            before.reducer = None
            record.earlier = before.earlier + len(before.steps)
            record.name += f" (remade after {record.earlier} steps)"
        self._by_module[ddp] = record
        self._records.append(record)
        return record

    def _meet(self) -> None:
        """Takes the default group's store as soon as there is one: it may be gone when the trace closes."""
        if self._ranks is None and dist.is_initialized():
            self._ranks = Ranks(self._path)


_open: Trace | None = None


def trace(path: str | os.PathLike[str], *, steps: int = _DEFAULT_STEPS) -> Trace:
    """Records a timeline of every rank while the ``with`` block runs; rank 0 writes it to ``path``.

    Open it on every rank, with the same file name. Each synchronized step of each wrapped module shows
    forward, the arrival of each gradient, packing, collectives, unpacking and waits.

    Args:
        path: the file to write, Chrome's trace event JSON, replaced if it exists.
        steps: keep at most the first ``steps`` steps of each module; the file says how many came after.

    Raises:
        TypeError, ValueError, OSError: at once, when ``steps`` < 1, the folder of ``path`` is missing, or ``path`` is
            empty or a folder. A file that cannot be written later is logged.
        RuntimeError: on entering, when another trace is open in this process.
    """
    return Trace(path, steps)


def after_step(ddp: Any) -> None:
    """Called by the module before a forward while ``active``: keeps the stamps of the step before."""
    if _open is not None:
        _open.add(ddp)


def _open_from_environment() -> None:
    """``MINDDP_TRACE=path``: a trace of the whole process, closed at its exit; the log says if it cannot be."""
    path = environment.trace_path()
    if not path:
        return
    try:
        opened = Trace(path, _DEFAULT_STEPS)
    except (OSError, ValueError) as error:
        log.warning("MINDDP_TRACE: this process takes no trace. %s", error)
        return
    atexit.register(opened.__enter__().close_if_used)


_open_from_environment()
