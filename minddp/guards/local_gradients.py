"""What ranks compare when an optimizer is about to use gradients that only this rank may have.

A backward through the wrapped module itself bypasses the wrapper. It leaves local gradients, as in torch, and waits
for nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient
that every rank computes alike is nobody's mistake: a penalty on the weights, say, or what the program has averaged by
itself. The difference shows only beside the other ranks. So a rank writes a signature of such gradients into the
store when it steps, whatever it steps, and reads the others' before it uses them. A rank that steps later or never is
not waited for long: the step goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from enum import Enum

import torch
import torch.distributed as dist

from ..logs import log
from . import times

_PATIENCE = 5  # looks: for the word of a rank that may not be about to step
_TOLERANCE = 1e-6  # relative: kernels need not add in the same order on every rank
_KEPT = 4  # words of this rank that stay in the store: who asks now has read those before


class Word(Enum):
    """What is known of another rank's word."""

    SAID = "it is in the store"
    OPEN = "it may come"
    LEFT = "the rank has left, or its data has ended in a join(): no replica is there that could differ"
    PASSED = "the rank has gone on without"


class LocalGradients:
    """Compares gradients that were made past one wrapper.

    Args:
        group: the wrapper's process group.
        store: carries the words; ``None``: nobody can be asked.
        key: tells this wrapper's words from others'; the same on all ranks.
        asks: what is known of a rank whose word is not there, asked about twice a look; may raise LostPeer.
        client: gives another client of the store, if there is one: the program's threads may block ``store``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        key: str,
        asks: Callable[[int, float], Word] = lambda rank, seconds: Word.OPEN,
        client: Callable[[], dist.Store | None] = lambda: None,
    ):
        self._asks, self._client, self._base, self._key = asks, client, store, key
        self._rank, self._size = group.rank(), group.size()
        self._asked = -1, 0  # iteration and number of the last question
        self._shown: Hashable = None  # the moment of the last word
        self._mine: dict[str, list[float]] = {}  # that word
        self._is_compared = self._has_told = False
        self._refusal: RuntimeError | None = None
        self._kept: list[str] = []
        self._joined_as = ""

    def name(self, key: str) -> None:
        self._key = key

    @property
    def _store(self) -> dist.Store:
        assert self._base is not None
        return dist.PrefixStore(f"minddp/local/{self._key}", self._client() or self._base)

    @property
    def _is_alone(self) -> bool:
        return self._base is None or self._size == 1

    def note_joined(self, now: bool) -> None:
        """This rank has no more data, in a ``join()``: nobody waits for its word. Or (False) all go on together."""
        before, self._joined_as = self._joined_as, self._key if now else ""
        if self._joined_as != before and not self._is_alone:
            with suppress(RuntimeError):  # the store's host has left: nobody can ask
                self._store.set(f"joined/{self._rank}", "yes" if now else "no")
                self._store.check([f"joined/{self._rank}"])  # it has arrived when this returns

    def _has_joined(self, rank: int) -> bool:
        key = f"joined/{rank}"
        return self._store.check([key]) and self._store.get(key) == b"yes"

    def check(
        self, named: Sequence[tuple[str, torch.Tensor]], moment: Hashable, iteration: int, uses: bool = True
    ) -> None:
        """Shows these gradients once at each such moment, whoever steps how often; compares before they are used.

        Args:
            named: all gradients that this rank may have alone, with their parameters' names.
            moment: tells one question from the next on this rank.
            iteration: how many synchronized iterations there have been, on all ranks alike.
            uses: the step changes some of these parameters.

        Raises:
            RuntimeError: the ranks' differ, or another rank has none.
            LostPeer: a rank whose word is waited for has failed.

        If the store's host has left, nobody can be asked: that is logged, once a moment.
        """
        named = [(name, gradient) for name, gradient in named if has_values(gradient)]
        if not named or self._is_alone:
            return
        try:
            if moment != self._shown:
                self._shown, self._is_compared, self._refusal = moment, False, None
                self._show(named, iteration)
            if uses and not self._is_compared:
                self._is_compared = True
                self._refusal = self._compare()
        except dist.DistNetworkError:
            self._is_compared = True
            log.warning(_NOBODY_ANSWERS, self._rank, named[0][0])
        if uses and self._refusal is not None:
            raise self._refusal

    def _show(self, named: Sequence[tuple[str, torch.Tensor]], iteration: int) -> None:
        self._asked = iteration, self._asked[1] + 1 if self._asked[0] == iteration else 0
        self._mine = {name: _signature(gradient) for name, gradient in named}
        key = "{}/{}/{}".format(*self._asked, self._rank)
        self._store.set(key, json.dumps(self._mine))
        self._store.check([key])  # it has arrived when this returns
        self._kept.append(key)
        if len(self._kept) > _KEPT:
            with suppress(RuntimeError, NotImplementedError):  # a store that deletes nothing
                self._store.delete_key(self._kept.pop(0))

    def _compare(self) -> RuntimeError | None:
        begin = time.monotonic()
        for rank in (rank for rank in range(self._size) if rank != self._rank):
            key = "{}/{}/{}".format(*self._asked, rank)
            word = self._await(rank, key, begin)
            if word is Word.PASSED:
                waited = time.monotonic() - begin
                return self._refused([*self._mine], f"rank {rank} has shown none for {waited:.0f} s")
            if word is Word.OPEN and not self._has_told:
                self._has_told = True
                log.warning(_NO_WORD, self._rank, next(iter(self._mine)), rank, time.monotonic() - begin)
            if word is Word.SAID:
                theirs = json.loads(self._store.get(key))
                differing = [name for name, mine in self._mine.items() if not _alike(mine, theirs.get(name))]
                if differing:
                    return self._refused(differing, f"they differ from rank {rank}'s")
        return None

    def _refused(self, names: Sequence[str], how: str) -> RuntimeError:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        shown = ", ".join(f"'{name}'" for name in names[:10]) + more
        return RuntimeError(
            f"optimizer.step() on rank {self._rank} would use gradients that were never averaged, of {shown}: their "
            f"backward ran through no forward of DistributedDataParallel's, but past it, and {how}. The "
            "replicas would drift apart. Call the wrapper, ddp(...), instead of ddp.module(...) or one of its "
            "methods; or zero these gradients before step(); or, to train each rank by itself on purpose, run "
            "forward and backward inside of ddp.no_sync(). With static_graph=True, what no rank used in "
            "the first iteration is never averaged: its local gradients count as such, too."
        )

    def _await(self, rank: int, key: str, begin: float) -> Word:
        """Waits for a rank's word: some looks, while nobody knows whether it comes."""
        looked = slept = 0.0  # counted: a test library may stop the clock
        word = Word.OPEN
        while not self._store.check([key]):
            if self._has_joined(rank):
                return Word.LEFT
            if word is not Word.OPEN:  # which was so before the word was looked for once more
                return word
            waited = max(time.monotonic() - begin, slept)
            if waited - looked >= 0.5 * times.look:
                looked, word = waited, self._asks(rank, waited)
            elif waited >= _PATIENCE * times.look:
                return Word.OPEN
            else:
                pause = min(0.001 + waited / 10, 0.25 * times.look)
                time.sleep(pause)
                slept += pause
        return Word.SAID


_NOBODY_ANSWERS = (
    "optimizer.step() on rank %d uses gradients that DistributedDataParallel has not averaged, of "
    "'%s' among others. Whether the other ranks have the same cannot be told: the process that holds the group's "
    "store has ended."
)

_NO_WORD = (
    "optimizer.step() on rank %d uses gradients that DistributedDataParallel has not averaged, of "
    "'%s' among others. Rank %d has said nothing about its own for %.0f s: it may step later, or not at all. The "
    "step goes on, and so do later ones after as long a wait. If that rank's differ, the replicas drift apart."
)


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
