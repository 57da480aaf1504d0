"""Steps on gradients that only this rank has.

A backward through the wrapped module itself bypasses the wrapper. It leaves local gradients, as in torch, and waits
for nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient
that every rank computes alike is nobody's mistake: a penalty on the weights, say. The difference shows only beside
the other ranks, so they are asked, through the store, and only where such gradients are about to be used. A rank
says its word when it steps, whatever it steps. One that is elsewhere, and steps later or never, is not waited for
long: the step goes on, and what that rank says is compared at the next one.

A synchronized forward whose backward never came takes the next one, even one that bypasses the wrapper, as in torch.
That is right where the other ranks are in that forward's backward, or have such a one as well. Else its collectives
would meet the others' next ones, and gradients of different things would be added: so ranks meet before that.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from . import times

log = logging.getLogger("minddp")

# (a rank, the seconds for which this one has waited for its word, whether in a backward): whether it comes, as it
# were; False: it will certainly not; None: not known.
Comes = Callable[[int, float, bool], "bool | None"]
_PATIENCE = 5  # looks: for the word of a rank that may not be about to step
_TOLERANCE = 1e-6  # relative: kernels need not add in the same order on every rank


class LocalGradients:
    """Compares gradients that were made past one wrapper.

    Args:
        group: the wrapper's process group.
        store: carries the answers; ``None``: nobody can be asked.
        key: tells this wrapper's answers from others'; the same on all ranks.
        comes: says of a rank that is waited for whether it does, or certainly will not. Any other is waited for as
            long as the group's timeout says, or the store's if that is longer.
        has_ended: says of a rank whether it has left: no replica is there that could differ.
        client: gives another client of the store, if there is one: the program's threads may block ``store``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        key: str,
        comes: Comes = lambda rank, seconds, within: None,
        has_ended: Callable[[int], bool] = lambda rank: False,
        client: Callable[[], dist.Store | None] = lambda: None,
    ):
        self._asks, self._has_ended, self._client = comes, has_ended, client
        self._rank, self._size = group.rank(), group.size()
        self._base = store
        self._group_seconds = _timeout_of(group)
        self._asked: tuple[int, int] | None = None  # iteration and number of the last question
        self._shown = -1  # the backward of the last word
        self._mine: dict[str, list[float]] = {}  # that word
        self._is_compared = False
        self._open: list[tuple[int, str, dict[str, list[float]]]] = []  # silent ranks, their keys, this word
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
            RuntimeError: the ranks' differ, or have differed at an earlier step; or another rank has none.

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
                self._refusal = self._compare_earlier() or self._compare()
        except dist.DistNetworkError:
            self._is_compared = True
            log.warning(_NOBODY_ANSWERS, self._rank, named[0][0])
        if uses and self._refusal is not None:
            raise self._refusal

    def meet(self, iteration: int, history: Sequence[int]) -> None:
        """Returns when every rank has called it, in a backward of this iteration; or has said that it sends in its
        own, or waits there for this one.

        Args:
            iteration: what is about to be sent.
            history: what this rank has done since the last one.

        Raises:
            RuntimeError: a rank will not come, or has done something else.
        """
        self._meet(f"taken/{iteration}", _NOT_ALL, within=True, history=json.dumps(history))

    def note_sending(self, iteration: int, history: Sequence[int]) -> None:
        """This rank sends, in a backward through the wrapper's forward: who asks need not wait until it is missed."""
        with suppress(dist.DistError, RuntimeError):  # the store's host has left: nobody can ask
            self._say(f"taken/{iteration}", json.dumps(history))

    def meet_after_step(self, iteration: int) -> None:
        """As :meth:`meet`, of ranks whose optimizer's step has ended with an exception."""
        self._meet(f"stepped/{iteration}", _NOT_ALL_STEPPED, within=False)

    def _meet(self, what: str, message: str, within: bool, history: str = "") -> None:
        if self._size == 1 or self._store is None:
            return
        begin = time.monotonic()
        try:
            self._say(what, "")
            for rank in self._others():
                key = f"{what}/{rank}"
                if not self._comes(rank, key, begin, within) or not self._is_alike(key, history):
                    raise RuntimeError(message.format(self._rank, rank, time.monotonic() - begin))
        except dist.DistNetworkError:  # the store's host has left: nobody can be asked
            log.warning(_NOT_ASKED, self._rank)

    def _say(self, what: str, word: str) -> None:
        assert self._store is not None
        self._store.set(f"{what}/{self._rank}", word)
        self._forget(f"{what}/{self._rank}")

    def _is_alike(self, key: str, history: str) -> bool:
        """Whether what a rank has said is no other history. It says none where it waits as this one does."""
        assert self._store is not None
        return not self._store.check([key]) or self._store.get(key).decode() in ("", history)

    def _show(self, named: Sequence[tuple[str, torch.Tensor]], iteration: int) -> None:
        assert self._store is not None
        again = self._asked is not None and self._asked[0] == iteration
        self._asked = (iteration, self._asked[1] + 1 if again and self._asked else 0)
        self._mine = {name: _signature(gradient) for name, gradient in named}
        self._say(self._turn, json.dumps(self._mine))

    @property
    def _turn(self) -> str:
        assert self._asked is not None
        return f"{self._asked[0]}/{self._asked[1]}"

    def _compare(self) -> RuntimeError | None:
        begin = time.monotonic()
        for rank in self._others():
            key = f"{self._turn}/{rank}"
            comes = self._comes(rank, key, begin, patience=_PATIENCE * times.look)
            if comes is None:
                self._open.append((rank, key, self._mine))
                if not self._has_told:
                    self._has_told = True
                    log.warning(_NO_WORD, self._rank, next(iter(self._mine)), rank, time.monotonic() - begin)
            elif not comes and self._has_ended(rank):
                continue
            elif not comes:
                return RuntimeError(_message(list(self._mine), self._rank, rank, time.monotonic() - begin))
            elif refusal := self._difference(rank, key, self._mine):
                return refusal
        return None

    def _compare_earlier(self) -> RuntimeError | None:
        """With what ranks have said since."""
        still, self._open = self._open, []
        return next(filter(None, (self._difference(*each) for each in still)), None)

    def _difference(self, rank: int, key: str, mine: dict[str, list[float]]) -> RuntimeError | None:
        """None of a rank that has joined, or said nothing."""
        assert self._store is not None
        if not self._store.check([key]):
            return None
        theirs = json.loads(self._store.get(key))
        differing = [name for name in mine if not _alike(mine[name], theirs.get(name))]
        return RuntimeError(_message(differing, self._rank, rank, None)) if differing else None

    def _forget(self, key: str) -> None:
        """Deletes this rank's answer before the last: who asks now has read it."""
        self._kept.append(key)
        if len(self._kept) > 2:
            assert self._store is not None
            with suppress(RuntimeError, NotImplementedError):  # a store that deletes nothing
                self._store.delete_key(self._kept.pop(0))

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _comes(
        self, rank: int, key: str, begin: float, within: bool = False, patience: float = math.inf
    ) -> bool | None:
        """``None``: after so many seconds that is not known."""
        assert self._base is not None and self._store is not None
        longest = max(self._base.timeout.total_seconds(), self._group_seconds)  # type: ignore[attr-defined]
        looked = begin
        while not self._store.check([key]) and not self._has_joined(rank):
            now = time.monotonic()
            if now - looked >= 0.5 * times.look:
                looked = now
                comes = self._asks(rank, now - begin, within)
                if comes:
                    return True
                if comes is False or now - begin >= longest:
                    # Meanwhile it may have come, and gone on; or this machine, or the store, was blocked.
                    return self._store.check([key])
                if now - begin >= patience:
                    return None
            time.sleep(min(0.001 + (now - begin) / 10, 0.25 * times.look))
        return True

    def _has_joined(self, rank: int) -> bool:
        assert self._store is not None
        key = f"joined/{rank}"
        return self._store.check([key]) and self._store.get(key) == b"yes"


_NOT_ALL = (
    "A backward on rank {0} went through no forward of DistributedDataParallel's, but past it, while a forward "
    "waited for its backward: it was taken for that one's, as in torch, and its gradients were about to be averaged. "
    "But rank {1} has had no such backward for {2:.0f} s. Call the wrapper, ddp(...), instead of ddp.module(...), on "
    "every rank; or run a forward that no backward follows under torch.no_grad() or ddp.no_sync()."
)

_NOBODY_ANSWERS = (
    "optimizer.step() on rank %d uses gradients of a backward that ran past DistributedDataParallel's forward, of "
    "'%s' among others. Whether the other ranks have the same cannot be told: the process that holds the group's "
    "store has ended."
)

_NOT_ASKED = (
    "Rank %d would ask the other ranks whether they are in the same backward, or whether their optimizer's step has "
    "ended with an exception, too. The process that holds the group's store has ended: it goes on without."
)

_NO_WORD = (
    "optimizer.step() on rank %d uses gradients of a backward that ran past DistributedDataParallel's forward, of "
    "'%s' among others. Rank %d has said nothing about its own for %.0f s: it may step later, or not at all. The "
    "step goes on, and so do later ones after as long a wait; if that rank's turn out to differ, one raises."
)

_NOT_ALL_STEPPED = (
    "optimizer.step() on rank {0} ended with an exception, which the program caught; on rank {1} it did not (asked "
    "for {2:.0f} s). Their parameters, and their optimizers' states, are no longer the same. Go on from a "
    "checkpoint, on every rank; or let the exception end the process."
)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds; 0 where it does not tell."""
    with suppress(Exception):
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
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
