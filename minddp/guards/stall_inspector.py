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
from contextlib import suppress

import torch.distributed as dist

WARN_SECONDS = 10

# Reducers of one group are made in the same order on all its ranks: counting gives them common names.
_counters: dict[str, itertools.count[int]] = {}


class StallInspector:
    """The notes of one reducer's ranks. REQUIRES: a default process group, whose store carries them.

    That a rank has failed is noted for all reducers together: whichever of them waits for it hears of it.
    """

    def __init__(self, group: dist.ProcessGroup):
        name = group.group_name
        self._base = store = dist.distributed_c10d._get_default_store()
        self.rename(f"{name}/{next(_counters.setdefault(name, itertools.count()))}")
        self._failures = dist.PrefixStore("minddp/failed", store)
        self._ranks = dist.get_process_group_ranks(group)  # in the default group, by rank in this one
        self._rank = group.rank()
        self._reported = False

    def rename(self, key: str) -> str:
        """From now on the notes of all ranks are found under ``key``."""
        self.key = key
        self._store = dist.PrefixStore(f"minddp/stall/{key}", self._base)
        return key

    def report_failure(self, error: BaseException | str) -> None:
        """This rank will not finish its backward: tells the others why, in the words of the first who knows."""
        if self._reported:
            return
        self._reported = True
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        with suppress(dist.DistError, RuntimeError):  # the store may be gone, and the error itself matters more
            self._failures.set(str(self._ranks[self._rank]), text)

    def take_back(self) -> None:
        """What this rank has reported is over. Costs nothing where it has reported nothing."""
        if self._reported:
            self._reported = False
            with suppress(dist.DistError, RuntimeError):
                self._failures.set(str(self._ranks[self._rank]), "")

    def on_stall(self, seconds: float, bucket: int) -> None:
        """Called about once a second while the collective of ``bucket`` does not end, and when it has failed.

        Raises:
            RuntimeError: another rank has reported a failure.
        """
        with suppress(dist.DistError):  # the store may be gone with its rank: the collective's own error will tell
            self._look_around(seconds, bucket)

    def _look_around(self, seconds: float, bucket: int) -> None:
        for rank in self._others():
            note = str(self._ranks[rank])
            if self._failures.check([note]) and (text := self._failures.get(note).decode()):
                raise RuntimeError(
                    f"rank {rank} will not take part in the reduction of bucket {bucket}, for which rank "
                    f"{self._rank} has waited {seconds:.0f} s. Rank {rank} says: {text}"
                )
        self._store.set(f"waits/{self._rank}", json.dumps(bucket))
        if int(seconds) == WARN_SECONDS:
            warnings.warn(self._who_is_missing(bucket), RuntimeWarning, stacklevel=2)

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if rank != self._rank]

    def _who_is_missing(self, bucket: int) -> str:
        waiting = [rank for rank in self._others() if self._store.check([f"waits/{rank}"])]
        absent = [rank for rank in self._others() if rank not in waiting]
        return (
            f"rank {self._rank} has waited {WARN_SECONDS} s for bucket {bucket}. Ranks {absent} have not reported "
            f"waiting: they are slow, or took another branch and never launched it (ranks {waiting} wait too)."
        )
