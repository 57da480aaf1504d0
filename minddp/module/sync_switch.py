"""Whether a forward's backward is synchronized: ``no_sync()``, and the attribute that it sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SyncSwitch:
    """The part of :class:`DistributedDataParallel` that is told when to synchronize."""

    _minddp_engine: Any

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of a forward that runs now is synchronized; ``no_sync`` sets it, libraries too.

        It stands among the instance's attributes, as with torch's class: a class's attribute does not hide it.
        """
        return bool(self.__dict__.get("require_backward_grad_sync", True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["require_backward_grad_sync"] = value
        self._minddp_synchronizes()

    @require_backward_grad_sync.deleter
    def require_backward_grad_sync(self) -> None:
        """What ``unittest.mock.patch.object`` does at its end."""
        self.require_backward_grad_sync = True

    def _minddp_synchronizes(self) -> bool:
        """What holds now, which the reducer is told. A subclass may have an attribute of its own for it."""
        synchronizes = bool(self.require_backward_grad_sync)
        engine = self.__dict__.get("_minddp_engine")
        if engine is not None:
            engine.reducer.sync_enabled = synchronizes
        return synchronizes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside accumulate locally; the next backward of one outside averages all of it.

        What counts is where *forward* runs, as in torch: a backward outside of a forward that ran inside stays local,
        and an optimizer's step on it warns. Steps on local gradients (local SGD) are fine.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self._minddp_synchronizes()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            self._minddp_synchronizes()
