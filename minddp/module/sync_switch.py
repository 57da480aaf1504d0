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
        """Whether the backward of a forward that runs now is synchronized; ``no_sync`` sets it, libraries too."""
        engine = self.__dict__.get("_minddp_engine")
        if engine is None:
            return self.__dict__.get("_minddp_sync_without_reducer", True)
        return engine.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        engine = self.__dict__.get("_minddp_engine")
        if engine is None:
            self.__dict__["_minddp_sync_without_reducer"] = bool(value)
        else:
            engine.reducer.sync_enabled = bool(value)

    @require_backward_grad_sync.deleter
    def require_backward_grad_sync(self) -> None:
        """What ``unittest.mock.patch.object`` does at its end."""
        self.require_backward_grad_sync = True

    def _minddp_synchronizes(self) -> bool:
        """A subclass may have a ``require_backward_grad_sync`` of its own, which each forward is asked by."""
        synchronizes = bool(self.require_backward_grad_sync)
        self._minddp_engine.reducer.sync_enabled = synchronizes
        return synchronizes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside accumulate locally; the next backward of one outside averages all of it.

        What counts is where *forward* runs, as in torch: a backward outside of a forward that ran inside stays local,
        and an optimizer's step on it warns. Steps on local gradients (local SGD) are fine.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
