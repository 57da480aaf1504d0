"""What ranks compare when an optimizer is about to use gradients that only this rank may have.

A backward through the wrapped module itself bypasses the wrapper. It leaves local gradients, as in torch, and waits
for nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient
that every rank computes alike is nobody's mistake: a penalty on the weights, say, or what the program has averaged by
itself. The difference shows only beside the other ranks. So a rank writes a signature of such gradients into the
store when it steps, whatever it steps, and counts itself. The last one reads all and writes the verdict, for which
those wait that use the gradients. A rank that steps later or never is not waited for long: the step goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..logs import log
from ..messages import global_ranks
from . import times
from .lost import Watch, look_into
from .roll import Entry, Place, Roll, parted
from .watchdog import Watchdog

_PATIENCE = 5  # looks: for the word of a rank that may not be about to step
_TOLERANCE = 1e-6  # relative, or one rounding: kernels need not add in the same order on every rank
_KEPT = 4  # questions whose keys stay in the store: who asks now has read those before

Signatures = dict[str, list[float]]


class Words:
    """Compares gradients that were made past one wrapper.

    Args:
        watch: of the wrapper's reducer: by its watchdog words travel.
    """

    def __init__(self, watch: Watch):
        self._watch, self._rank, self._size = watch, watch.group.rank(), watch.group.size()
        self._asked = -1, 0  # iteration and number of the last question
        self._shown: Hashable = None  # the moment of the last word
        self._mine: Signatures = {}  # that word
        self._is_compared = self._has_told = False
        self._refusal: RuntimeError | None = None
        self._kept: list[str] = []

    def check(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        moment: Hashable,
        iteration: int,
        uses: bool = True,
        why: str = "",
    ) -> None:
        """Shows these gradients once at each such moment, whoever steps how often; compares before they are used.

        Args:
            named: all gradients that this rank may have alone, with their parameters' names.
            moment: tells one question from the next on this rank.
            iteration: how many synchronized iterations there have been, on all ranks alike.
            uses: the step changes some of these parameters.
            why: what else is known of them; the error begins with it.

        Raises:
            RuntimeError: the ranks' differ, or another rank has none.
            LostPeer: a rank whose word is waited for has failed.

        If the store does not answer, nobody can be asked: that is logged, once a moment.
        """
        named = [(name, gradient) for name, gradient in named if has_values(gradient)]
        dog = self._watch.dog
        if not named or dog is None or self._size == 1:
            return
        if moment != self._shown:
            self._shown, self._is_compared, self._refusal = moment, False, None
            self._asked = iteration, self._asked[1] + 1 if self._asked[0] == iteration else 0
            self._mine = {name: _signature(gradient) for name, gradient in named}
            dog.run(self._show, _PATIENCE * times.look)
        if uses and not self._is_compared:
            self._is_compared = True
            self._refusal = self._compare(dog, why)
        if uses and self._refusal is not None:
            raise self._refusal

    # --- on this thread ---

    def _compare(self, dog: Watchdog, why: str) -> RuntimeError | None:
        watch = self._watch
        wait = watch.wait("words", self._asked[0] * 1000 + self._asked[1] + 1, "the others' word on their gradients")
        begin, slept, due, call = time.monotonic(), 0.0, math.inf, 0  # counted: a test library may stop the clock
        while not dog.lost:
            verdict = dog.run(self._read_verdict, times.look)
            if verdict:
                dog.waits_no_more()
                return self._refused(verdict, why)
            waited = max(time.monotonic() - begin, slept)
            look_into(dog, watch.group, wait, waited, "")
            if due == math.inf and waited >= times.look:
                call = dog.run(lambda roll: roll.call(wait), times.look) or 0
                due = waited + 2 * dog.interval + 0.5 * times.look
            elif waited >= due and call:
                dog.run(self._judge, times.look)
                call = 0
            elif waited >= max(_PATIENCE * times.look, due if call else 0.0):
                dog.waits_no_more()
                if not self._has_told:
                    self._has_told = True
                    log.warning(_NO_WORD, self._rank, next(iter(self._mine)), waited)
                return None
            pause = min(0.001 + waited / 10, 0.25 * times.look)
            time.sleep(pause)
            slept += pause
        log.warning(_NOBODY_ANSWERS, self._rank, next(iter(self._mine)))
        return None

    def _refused(self, verdict: Entry, why: str) -> RuntimeError | None:
        ranks = verdict["ranks"]
        names = [name for name in verdict["names"] or self._mine if name in self._mine]
        if not ranks or not names:
            return None
        other = next((rank for rank in ranks if rank != self._rank), ranks[0])
        how = f"they differ from rank {other}'s" if verdict["names"] else f"rank {other} has shown none"
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        shown = ", ".join(f"'{name}'" for name in names[:10]) + more
        would = f"optimizer.step() on rank {self._rank} would use gradients that were never averaged, of {shown}"
        if why:
            return RuntimeError(f"{why} {would}, and {how}: the replicas would drift apart.")
        return RuntimeError(
            f"{would}: their backward ran through no forward of DistributedDataParallel's, but past it, and {how}. "
            "The replicas would drift apart. Call the wrapper, ddp(...), instead of ddp.module(...) or one of its "
            "methods; or zero these gradients before step(); or, to train each rank by itself on purpose, run "
            "forward and backward inside of ddp.no_sync(). With static_graph=True, what no rank used in the first "
            "iteration is never averaged: its local gradients count as such, too."
        )

    # --- on the watchdog's ---

    def _store(self, roll: Roll, question: str = "") -> Any:
        question = question or "{}.{}".format(*self._asked)
        return dist.PrefixStore(f"words/{self._watch.key}/{question}", roll.store)

    def _show(self, roll: Roll) -> None:
        store = self._store(roll)
        store.set(f"{self._rank}", json.dumps(self._mine))
        if store.add("said", 1) == self._size:
            self._settle(store)
        self._kept.append("{}.{}".format(*self._asked))
        while len(self._kept) > _KEPT:
            old = self._store(roll, self._kept.pop(0))
            for key in (f"{self._rank}", "said", "verdict")[: 3 if self._rank == 0 else 1]:
                roll.delete(old, key)

    def _read_verdict(self, roll: Roll) -> Entry | None:
        store = self._store(roll)
        return json.loads(store.get("verdict")) if store.check(["verdict"]) else None

    def _settle(self, store: Any) -> None:
        """Of what is there: which gradients differ, and between whom."""
        said = {r: json.loads(store.get(f"{r}")) for r in range(self._size) if store.check([f"{r}"])}
        first, *others = said
        differing: dict[str, int] = {}
        for rank in others:
            for name in {**said[first], **said[rank]}:
                if not _alike(said[first].get(name), said[rank].get(name)):
                    differing.setdefault(name, rank)
        ranks = [first, *dict.fromkeys(differing.values())][:2] if differing else []
        store.set("verdict", json.dumps({"names": [*differing], "ranks": ranks}))

    def _judge(self, roll: Roll) -> None:
        """What the ranks that have not come have answered: one that has gone on has nothing to show."""
        ranks = global_ranks(self._watch.group) or [*range(self._size)]
        others = [rank for rank in ranks if rank != ranks[self._rank]]
        answers, left, store, mine = roll.answers(others), roll.left(others), self._store(roll), self._watch.place()
        missing = [r for r in range(self._size) if not store.check([f"{r}"])]
        passed = [r for r in missing if mine and self._has_gone_on(answers.get(ranks[r]), mine)]
        if passed:
            store.set("verdict", json.dumps({"names": [], "ranks": passed[:2]}))
        elif all(ranks[r] in left or _joins(answers.get(ranks[r])) for r in missing):
            self._settle(store)

    def _has_gone_on(self, answer: Entry | None, mine: Place) -> bool:
        """Whether a rank is past the beginning of a later backward of the wrapper than this one, or waits in a later
        collective."""
        place = None if answer is None else answer["places"].get(self._watch.key)
        if answer is None or place is None:
            return False
        begun, _, collectives, _ = place
        reached = {"backward": begun, "collective": collectives}
        for name, number, *_ in answer["waits"]:
            owner, kind = parted(name)
            if owner == self._watch.key and kind in reached:
                reached[kind] = number
        return bool(reached["backward"] > mine.begun or reached["collective"] > mine.collectives)


_NOBODY_ANSWERS = (
    "optimizer.step() on rank %d uses gradients that DistributedDataParallel has not averaged, of "
    "'%s' among others. Whether the other ranks have the same cannot be told: the process that holds the group's "
    "store has ended."
)

_NO_WORD = (
    "optimizer.step() on rank %d uses gradients that DistributedDataParallel has not averaged, of "
    "'%s' among others. Some rank has said nothing about its own for %.0f s: it may step later, or not at all. The "
    "step goes on, and so do later ones after as long a wait. If that rank's differ, the replicas drift apart."
)


def _joins(answer: Entry | None) -> bool:
    """It has no more data, in a ``join()``: it takes no step."""
    return answer is not None and any(joins for _, _, _, joins in answer["waits"])


def has_values(gradient: torch.Tensor) -> bool:
    """Not zeroed since."""
    values = gradient.detach()
    return bool((values.coalesce().values() if values.is_sparse else values).any())


def _signature(gradient: torch.Tensor) -> list[float]:
    """Its norm, and sums with two fixed weights by position: of gradients in another order they differ. Last, how
    much one rounding of its dtype changes."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        positions, gradient = gradient.indices().double().sum(0), gradient.values()
        position = positions.view(-1, *[1] * (gradient.dim() - 1))
        gradient = gradient * (position * 0.7).cos().to(gradient.dtype)
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    values = values.double().flatten()
    place = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
    return [float(values.norm()), float(values @ (place * 0.7).cos()), float(values @ (place * 1.3).sin()), eps]


def _alike(mine: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    if mine is None or theirs is None:
        return False
    limit = max(_TOLERANCE, mine[3]) * max(abs(mine[0]), abs(theirs[0]), 1e-30)
    return all((math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= limit for a, b in zip(mine, theirs))
