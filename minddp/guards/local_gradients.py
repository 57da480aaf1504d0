"""Steps on gradients that only this rank has.

A backward through the wrapped module itself bypasses the wrapper. It leaves local gradients, as in torch, and waits
for nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient
that every rank computes alike is nobody's mistake: a penalty on the weights, say. The difference shows only beside
the other ranks, so they are asked, through the store, and only where such gradients are about to be used. A rank
says its word when it steps, whatever it steps. A rank that is elsewhere, and steps later or never, is not waited for
long: the step goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum

import torch
import torch.distributed as dist

from ..logs import log
from . import times

_PATIENCE = 5  # looks: for the word of a rank that may not be about to step
_TOLERANCE = 1e-6  # relative: kernels need not add in the same order on every rank


class Word(Enum):
    """Of a rank: whether it says what another one waits for."""

    SAID = "it has, or its data has ended in a join()"
    OPEN = "nobody knows"
    ENDING = "it is gone; whether it has left or is lost is known in a moment"
    LEFT = "it has left: no replica is there that could differ"
    PASSED = "it has gone on without"


Asks = Callable[[int, float], Word]  # by rank, and the seconds for which this rank has waited; may raise LostPeer


class LocalGradients:
    """Compares gradients that were made past one wrapper.

    Args:
        group: the wrapper's process group. No wait is longer than its timeout.
        store: carries the answers; ``None``: nobody can be asked.
        key: tells this wrapper's answers from others'; the same on all ranks.
        asks: says of a rank that has not said its word what is known of it.
        client: gives another client of the store, if there is one: the program's threads may block ``store``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        key: str,
        asks: Asks = lambda rank, seconds: Word.OPEN,
        client: Callable[[], dist.Store | None] = lambda: None,
    ):
        self._asks, self._client = asks, client
        self._rank, self._size = group.rank(), group.size()
        self._base = store
        self._longest = _timeout_of(group)
        self._asked: tuple[int, int] | None = None  # iteration and number of the last question
        self._shown = -1  # the backward of the last word
        self._mine: dict[str, list[float]] = {}  # that word
        self._is_compared = False
        self._has_told = False
        self._refusal: RuntimeError | None = None
        self._kept: list[str] = []
        self._joined_as = ""
        self.name(key)

    def name(self, key: str) -> None:
        self._key = key

    @property
    def _store(self) -> dist.Store | None:
        if self._base is None:
            return None
        return dist.PrefixStore(f"minddp/local/{self._key}", self._client() or self._base)

    def note_joined(self) -> None:
        """This rank has no more data: others' questions it answers no more, and is not asked."""
        if self._joined_as != self._key:
            self._joined_as = self._key
            self._say_joined("yes")

    def note_back(self) -> None:
        """No rank has; they go on together."""
        if self._joined_as == self._key:
            self._say_joined("no")
        self._joined_as = ""

    def _say_joined(self, word: str) -> None:
        """Waits for nobody: deleting a key would wait for the store's host."""
        with suppress(dist.DistError, RuntimeError):  # it has left: nobody can ask
            if self._size > 1 and self._store is not None:
                self._store.set(f"joined/{self._rank}", word)

    def check(
        self, named: Sequence[tuple[str, torch.Tensor]], backward: int, iteration: int, uses: bool = True
    ) -> None:
        """Tells the other ranks once for each such backward, whoever steps how often; asks them before it is used.

        Args:
            named: all gradients that bypassed the wrapper, with their parameters' names.
            backward: the last backward that made one, as autograd numbers them on this rank.
            iteration: how many synchronized iterations there have been, on all ranks alike.
            uses: the step changes some of these parameters.

        Raises:
            RuntimeError: the ranks' differ, or another rank has none.
            LostPeer: a rank whose word is waited for has failed.

        Where the store's host has left, nobody can be asked: that is logged, once a backward.
        """
        named = [(name, gradient) for name, gradient in named if has_values(gradient)]
        if not named or self._size == 1 or self._store is None:
            return
        try:
            if backward != self._shown:
                self._shown, self._is_compared, self._refusal = backward, False, None
                self._show(named, iteration)
            if uses and not self._is_compared:
                self._is_compared = True
                self._refusal = self._compare()
        except dist.DistNetworkError:
            self._is_compared = True
            log.warning(_NOBODY_ANSWERS, self._rank, named[0][0])
        if uses and self._refusal is not None:
            raise self._refusal

    def meet_after_step(self, iteration: int) -> None:
        """An exception has ended this rank's optimizer step, and left parameters as they were. Returns when that has
        happened on all other ranks, too.

        Raises:
            RuntimeError: another rank has gone on with its step.
        """
        if self._size == 1 or self._store is None:
            return
        begin = time.monotonic()
        with suppress(dist.DistNetworkError):  # the store's host has left: nobody can be asked
            self._say(f"stepped/{iteration}", "")
            for rank in self._others():
                if self._await(rank, f"stepped/{iteration}/{rank}", begin) in (Word.PASSED, Word.OPEN):
                    raise RuntimeError(_NOT_ALL_STEPPED.format(self._rank, rank, time.monotonic() - begin))

    def _say(self, what: str, word: str) -> None:
        """And forgets the answer before the last: who asks now has read it."""
        assert self._store is not None
        self._store.set(f"{what}/{self._rank}", word)
        self._kept.append(f"{what}/{self._rank}")
        if len(self._kept) > 2:
            with suppress(RuntimeError, NotImplementedError):  # a store that deletes nothing
                self._store.delete_key(self._kept.pop(0))

    def _show(self, named: Sequence[tuple[str, torch.Tensor]], iteration: int) -> None:
        again = self._asked is not None and self._asked[0] == iteration
        self._asked = (iteration, self._asked[1] + 1 if again and self._asked else 0)
        self._mine = {name: _signature(gradient) for name, gradient in named}
        self._say(self._turn, json.dumps(self._mine))

    @property
    def _turn(self) -> str:
        assert self._asked is not None
        return f"{self._asked[0]}/{self._asked[1]}"

    def _compare(self) -> RuntimeError | None:
        assert self._store is not None
        begin = time.monotonic()
        for rank in self._others():
            key = f"{self._turn}/{rank}"
            word = self._await(rank, key, begin, patience=_PATIENCE * times.look)
            if word is Word.PASSED:
                return RuntimeError(_message(list(self._mine), self._rank, rank, time.monotonic() - begin))
            if word is Word.OPEN and not self._has_told:
                self._has_told = True
                log.warning(_NO_WORD, self._rank, next(iter(self._mine)), rank, time.monotonic() - begin)
            if word is Word.SAID and self._store.check([key]):  # one that has joined has said nothing
                theirs = json.loads(self._store.get(key))
                differing = [name for name, mine in self._mine.items() if not _alike(mine, theirs.get(name))]
                if differing:
                    return RuntimeError(_message(differing, self._rank, rank, None))
        return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _await(self, rank: int, key: str, begin: float, patience: float = math.inf) -> Word:
        """Waits for a rank's word; while nobody knows whether it comes, ``patience`` seconds, or as long as the
        group's timeout says."""
        assert self._base is not None and self._store is not None
        longest = self._longest or self._base.timeout.total_seconds()  # type: ignore[attr-defined]
        looked = slept = 0.0  # counted: a test library may stop the clock
        while not self._store.check([key]) and not self._has_joined(rank):
            waited = max(time.monotonic() - begin, slept)
            if waited - looked >= 0.5 * times.look:
                looked = waited
                word = self._asks(rank, waited)
                if word in (Word.LEFT, Word.PASSED):
                    # Meanwhile it may have come, and gone on; or this machine, or the store, was blocked.
                    return Word.SAID if self._store.check([key]) else word
                if waited >= longest or (word is Word.OPEN and waited >= patience):
                    return Word.OPEN
            pause = min(0.001 + waited / 10, 0.25 * times.look)
            time.sleep(pause)
            slept += pause
        return Word.SAID

    def _has_joined(self, rank: int) -> bool:
        assert self._store is not None
        key = f"joined/{rank}"
        return self._store.check([key]) and self._store.get(key) == b"yes"


_NOBODY_ANSWERS = (
    "optimizer.step() on rank %d uses gradients of a backward that ran past DistributedDataParallel's forward, of "
    "'%s' among others. Whether the other ranks have the same cannot be told: the process that holds the group's "
    "store has ended."
)

_NO_WORD = (
    "optimizer.step() on rank %d uses gradients of a backward that ran past DistributedDataParallel's forward, of "
    "'%s' among others. Rank %d has said nothing about its own for %.0f s: it may step later, or not at all. The "
    "step goes on, and so do later ones after as long a wait. If that rank's differ, the replicas drift apart."
)

_NOT_ALL_STEPPED = (
    "optimizer.step() on rank {0} ended with an exception, which the program caught; on rank {1} it did not (asked "
    "for {2:.0f} s). Their parameters, and their optimizers' states, are no longer the same. Go on from a "
    "checkpoint, on every rank; or let the exception end the process."
)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds; 0 where it does not tell."""
    with suppress(Exception):
        backends = [group._get_backend(device) for device in group._device_types]
        return max(float(backend.options._timeout.total_seconds()) for backend in backends)
    return 0.0


def has_values(gradient: torch.Tensor) -> bool:
    """Not zeroed since."""
    values = gradient.detach()
    return bool((values.coalesce().values() if values.is_sparse else values).any())


def _signature(gradient: torch.Tensor) -> list[float]:
    """Its norm, and sums with two fixed weights by position: of gradients in another order they differ."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        positions, gradient = gradient.indices().double().sum(0), gradient.values()
        position = positions.view(-1, *[1] * (gradient.dim() - 1))
        gradient = gradient * (position * 0.7).cos().to(gradient.dtype)
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    values = values.double().flatten()
    place = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
    return [float(values.norm()), float(values @ (place * 0.7).cos()), float(values @ (place * 1.3).sin())]


def _alike(mine: Sequence[float], theirs: Sequence[float] | None) -> bool:
    if theirs is None:
        return False
    scale = max(abs(mine[0]), abs(theirs[0]), 1e-30)
    return all(
        (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= _TOLERANCE * scale for a, b in zip(mine, theirs)
    )


def _message(names: Sequence[str], rank: int, other: int, waited: float | None) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    shown = ", ".join(f"'{name}'" for name in names[:10]) + more
    differ = f"they differ from rank {other}'s"
    what = differ if waited is None else f"rank {other} has shown none for {waited:.0f} s"
    return (
        f"optimizer.step() on rank {rank} would use gradients that were never averaged, of {shown}: their backward "
        f"ran through no forward of DistributedDataParallel's, but past it, and {what}. The replicas would drift "
        "apart. Call the wrapper, ddp(...), instead of ddp.module(...) or one of its methods; "
        "or zero these gradients before step(); or, to train each rank by itself on purpose, run forward and "
        "backward inside of ddp.no_sync(). With static_graph=True, what no rank used in "
        "the first iteration is never averaged: its local gradients count as such, too."
    )
