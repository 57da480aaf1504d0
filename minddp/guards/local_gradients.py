"""What ranks compare when an optimizer is about to use gradients that only this rank may have.

A backward through the wrapped module itself bypasses the wrapper. It leaves local gradients, as in torch, and waits
for nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient
that every rank computes alike is nobody's mistake: a penalty on the weights, say, or what the program has averaged by
itself. The difference shows only beside the other ranks. So a rank writes a signature of such gradients into the
store when it steps, whatever it steps, and reads the others' before it uses them. A rank that steps later or never is
not waited for long: the step goes on.

A step that an exception has ended, and that the program goes on from, is nobody's mistake either if it has ended so
on all ranks. Each of them writes that at its next forward, and reads the others' after the backward that follows:
nobody waits, since all ranks have written by then.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from ..logs import log
from . import times
from .buffer_sizes import Sizes

_PATIENCE = 5  # looks: for the word of a rank that may not be about to step
_LOOKS = 20  # steps, until a rank that says nothing about what is only suspected is asked no more
_TOLERANCE = 1e-6  # relative: kernels need not add in the same order on every rank
_KEPT = 4  # words of this rank that stay in the store: who asks now has read those before


class Word(Enum):
    """What is known of another rank's word."""

    SAID = "it is in the store"
    OPEN = "it may come"
    LEFT = "the rank has left, or its data has ended in a join(): no replica is there that could differ"
    PASSED = "the rank has gone on without"


class Differ(RuntimeError):
    """Another rank has other gradients of ``names``, or has shown none for ``waited`` seconds."""

    def __init__(self, names: Sequence[str], rank: int, other: int, waited: float | None = None):
        self.names, self.rank, self.waited, self.how = names, rank, waited, f"they differ from rank {other}'s"
        if waited is not None:
            self.how = f"rank {other} has shown none for {waited:.0f} s"
        super().__init__(refusal(self))


def refusal(found: Differ) -> str:
    more = f" and {len(found.names) - 10} more" if len(found.names) > 10 else ""
    shown = ", ".join(f"'{name}'" for name in found.names[:10]) + more
    return (
        f"optimizer.step() on rank {found.rank} would use gradients that were never averaged, of {shown}: their "
        f"backward ran through no forward of DistributedDataParallel's, but past it, and {found.how}. The "
        "replicas would drift apart. Call the wrapper, ddp(...), instead of ddp.module(...) or one of its "
        "methods; or zero these gradients before step(); or, to train each rank by itself on purpose, run "
        "forward and backward inside of ddp.no_sync(). With static_graph=True, what no rank used in "
        "the first iteration is never averaged: its local gradients count as such, too."
    )


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
        self._looks: int | None = None  # at the others' words to the last one, if that is compared later
        self._refusal: Differ | None = None
        self._kept: list[str] = []
        self._joined_as = self._interrupted_as = ""
        self.interrupted: int | None = None  # the iteration after which an exception has ended a step

    def name(self, key: str) -> None:
        self._key = key

    @property
    def _store(self) -> dist.Store:
        return self._store_of(self._key)

    def _store_of(self, key: str) -> dist.Store:
        assert self._base is not None
        return dist.PrefixStore(f"minddp/local/{key}", self._client() or self._base)

    @property
    def _is_alone(self) -> bool:
        return self._base is None or self._size == 1

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

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
    ) -> bool:
        """Shows these gradients once at each such moment, whoever steps how often; compares before they are used.

        Args:
            named: all gradients that this rank may have alone, with their parameters' names.
            moment: tells one question from the next on this rank.
            iteration: how many synchronized iterations there have been, on all ranks alike.
            uses: the step changes some of these parameters.

        Returns:
            Whether they were compared.

        Raises:
            Differ: the ranks' differ, or another rank has none.
            LostPeer: a rank whose word is waited for has failed.

        If the store's host has left, nobody can be asked: that is logged, once a moment.
        """
        if not (named := self._to_compare(named)):
            return False
        try:
            if moment != self._shown:
                self._shown, self._is_compared, self._refusal, self._looks = moment, False, None, None
                self._show(named, iteration)
            if uses and not self._is_compared:
                self._is_compared = True
                self._refusal = self._compare()
        except dist.DistNetworkError:
            self._is_compared = True
            log.warning(_NOBODY_ANSWERS, self._rank, named[0][0])
        if uses and self._refusal is not None:
            raise self._refusal
        return uses

    def check_later(self, named: Sequence[tuple[str, torch.Tensor]], moment: Hashable, iteration: int) -> bool:
        """As :meth:`check`, for what is only suspected: nobody is waited for. Once all others have shown theirs, what
        this rank showed before is compared. Otherwise these gradients are shown.

        Returns:
            Whether something was compared, or nobody else shows anything.
        """
        if not (named := self._to_compare(named)):
            return False
        found: Differ | None = None
        settled = False
        with suppress(dist.DistNetworkError):
            if self._looks is not None:
                asked = "{}/{}".format(*self._asked)
                settled = self._store.check([f"{asked}/{rank}" for rank in self._others()])
                found = self._compare() if settled else None
                self._looks += 1
            if not settled and moment != self._shown:
                self._shown, self._looks = moment, self._looks or 0
                self._show(named, iteration)
        if found is not None:
            raise found
        return settled or (self._looks or 0) > _LOOKS

    def _to_compare(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Without those that are zero; none where nobody can be asked."""
        return [] if self._is_alone else [(name, gradient) for name, gradient in named if has_values(gradient)]

    def _show(self, named: Sequence[tuple[str, torch.Tensor]], iteration: int) -> None:
        self._asked = iteration, self._asked[1] + 1 if self._asked[0] == iteration else 0
        self._mine = {name: _signature(gradient) for name, gradient in named}
        self._say("{}/{}".format(*self._asked), json.dumps(self._mine))

    def _say(self, what: str, word: str) -> None:
        key = f"{what}/{self._rank}"
        self._store.set(key, word)
        self._store.check([key])  # it has arrived when this returns
        self._kept.append(key)
        if len(self._kept) > _KEPT:
            with suppress(RuntimeError, NotImplementedError):  # a store that deletes nothing
                self._store.delete_key(self._kept.pop(0))

    def _compare(self) -> Differ | None:
        begin = time.monotonic()
        for rank, word, theirs in self._words("{}/{}".format(*self._asked)):
            if word is Word.PASSED:
                return Differ(list(self._mine), self._rank, rank, time.monotonic() - begin)
            if word is Word.OPEN and not self._has_told:
                self._has_told = True
                log.warning(_NO_WORD, self._rank, next(iter(self._mine)), rank, time.monotonic() - begin)
            if word is Word.SAID:
                differing = [name for name, mine in self._mine.items() if not _alike(mine, theirs.get(name))]
                if differing:
                    return Differ(differing, self._rank, rank)
        return None

    def _words(self, what: str) -> Iterator[tuple[int, Word, Any]]:
        """Of each other rank, as soon as that is known: what it has said."""
        begin = time.monotonic()
        for rank in self._others():
            key = f"{what}/{rank}"
            word = self._await(rank, key, begin)
            yield rank, word, json.loads(self._store.get(key)) if word is Word.SAID else None

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

    # --- buffers that have other sizes than before ---

    def check_buffers(self, number: int, before: Sizes, mine: Sizes) -> None:
        """Before the copy of this number. A rank that has gone on without a word has those sizes that all had before.

        Raises:
            RuntimeError: another rank's are not ``mine``.
        """
        if self._is_alone:
            return
        with suppress(dist.DistNetworkError):
            self._say(f"buffers/{number}", json.dumps(mine))
            for rank, word, said in self._words(f"buffers/{number}"):
                theirs = before if word is Word.PASSED else said or mine
                for name in {**mine, **theirs}:
                    (here, shape), (there, other) = (sizes.get(name, [None, "missing"]) for sizes in (mine, theirs))
                    if here != there:
                        raise RuntimeError(_BUFFERS.format(name, shape, self._rank, other, rank))

    # --- steps that an exception has ended ---

    def note_interrupted(self, iteration: int) -> None:
        """At a forward: an exception has ended this rank's last step, and has left parameters as they were."""
        if not self._is_alone:
            self.interrupted, self._interrupted_as = iteration, self._key
            with suppress(dist.DistNetworkError):  # the store's host has left: nobody can be asked
                self._say(f"stepped/{iteration}", "")

    def check_interrupted(self, iteration: int) -> None:
        """After each ``iteration``: whether that has happened on all other ranks, too.

        Raises:
            RuntimeError: another rank has gone on with its step.
        """
        if self.interrupted is None or iteration <= self.interrupted:
            return
        noted, self.interrupted = self.interrupted, None
        store = self._store_of(self._interrupted_as)  # the wrapper may have got another name since
        with suppress(dist.DistNetworkError):
            for rank in self._others():
                if not store.check([f"stepped/{noted}/{rank}"]) and not self._has_joined(rank):
                    raise RuntimeError(_NOT_ALL_STEPPED.format(self._rank, rank))


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

_BUFFERS = (
    "DistributedDataParallel: the ranks' buffers have other sizes by now, and cannot be copied before this forward: "
    "'{}' is {} on rank {}, {} on rank {}. Give it one size on all ranks (that of the longest batch, say), or name "
    "it in _ddp_params_and_buffers_to_ignore; or pass forward_sync_buffers=False, if each rank may have its own."
)

_NOT_ALL_STEPPED = (
    "optimizer.step() on rank {0} ended with an exception, which the program caught; on rank {1} it did not. "
    "Their parameters, and their optimizers' states, are no longer the same. Go on from a checkpoint, on every rank; "
    "or let the exception end the process."
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
