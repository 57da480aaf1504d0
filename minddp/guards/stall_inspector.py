"""Who is missing when a collective does not end.

A rank that raises, or that never reaches a bucket's collective, leaves the others waiting for the group's
timeout (30 minutes by default). So a rank that fails leaves a note in the process group's store, and one
that has waited for more than a second looks there every second: it raises what it finds, with the other
rank's own words, and otherwise tells once, after ten seconds, which ranks have not come.

Costs nothing while collectives end within a second.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

WARN_SECONDS = 10

# Reducers of one group are made in the same order on all its ranks: counting gives them common names.
_counters: dict[str, itertools.count[int]] = {}


class StallInspector:
    """The notes of one reducer's ranks. REQUIRES: a default process group, whose store carries them."""

    def __init__(self, group: dist.ProcessGroup):
        name = group.group_name
        self.key = f"{name}/{next(_counters.setdefault(name, itertools.count()))}"
        self._store = dist.PrefixStore(f"minddp/stall/{self.key}", dist.distributed_c10d._get_default_store())
        self._rank, self._size = group.rank(), group.size()
        self._reported = False

    def report_failure(self, error: BaseException) -> None:
        """This rank will not finish its backward: tells the others why."""
        self._reported = True
        with suppress(dist.DistError, RuntimeError):  # the store may be gone, and the error itself matters more
            self._store.set(f"failed/{self._rank}", f"{type(error).__name__}: {error}")

    def take_back(self) -> None:
        """What this rank has reported is over. Costs nothing where it has reported nothing."""
        if self._reported:
            self._reported = False
            with suppress(dist.DistError, RuntimeError):
                self._store.set(f"failed/{self._rank}", "")

    def on_stall(self, seconds: float, bucket: int) -> None:
        """Called about once a second while the collective of ``bucket`` does not end, and when it has failed.

        Raises:
            RuntimeError: another rank has reported a failure.
        """
        with suppress(dist.DistError):  # the store may be gone with its rank: the collective's own error will tell
            self._look_around(seconds, bucket)

    def _look_around(self, seconds: float, bucket: int) -> None:
        for rank in self._others():
            if self._store.check([f"failed/{rank}"]) and (text := self._store.get(f"failed/{rank}").decode()):
                raise RuntimeError(
                    f"rank {rank} will not take part in the reduction of bucket {bucket}, for which rank "
                    f"{self._rank} has waited {seconds:.0f} s. Rank {rank} says: {text}"
                )
        self._store.set(f"waits/{self._rank}", json.dumps(bucket))
        if int(seconds) == WARN_SECONDS:
            warnings.warn(self._who_is_missing(bucket), RuntimeWarning, stacklevel=2)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _who_is_missing(self, bucket: int) -> str:
        waiting = [rank for rank in self._others() if self._store.check([f"waits/{rank}"])]
        absent = [rank for rank in self._others() if rank not in waiting]
        return (
            f"rank {self._rank} has waited {WARN_SECONDS} s for bucket {bucket}. Ranks {absent} have not reported "
            f"waiting: they are slow, or took another branch and never launched it (ranks {waiting} wait too)."
        )

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, with the other ranks told when it raises."""

        def guarded(state: object, bucket: Any) -> Any:
            try:
                return hook(state, bucket)
            except Exception as error:
                self.report_failure(error)
                raise

        return guarded
