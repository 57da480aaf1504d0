"""Has every rank of a wrapper a communication hook, or none? If not, its averages are compared before they are used.

Ranks count through the store those with a hook and those without, once: in the wrapper's first synchronized backward.
A forward would be too early, since a rank may run one alone, and a program may register its hook after that. Nobody
waits for long there, since a collective of the program's own may hold another rank up; what is not known then is
looked at again before each step. A hook that is registered later is reported by the watchdog, with the iteration that
it begins with.

A hook on some ranks only may still give what the reducer's own all-reduce gives. So these ranks show their averages
before some steps, and refuse the step where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..logs import log
from ..messages import ranks_text
from . import times
from .local_gradients import Differ, LocalGradients

_PATIENCE = 2  # looks
_PROBATION = 10  # looks, in which a rank with a late hook shows what it has averaged
_COMPARED = 3  # steps
_WITH = 1 << 32  # what a rank with a hook adds to the count; others add 1


class HooksAlike:
    """Of one wrapper, whose name all ranks know.

    Args:
        inspector: of the wrapper's waits; its group has several ranks.
        dog: this process's watchdog.
        name: the wrapper's, which stays.
    """

    def __init__(self, inspector: Any, dog: Any, name: str):
        self._group, self._dog, self._name = inspector.group, dog, f"{name}/hook"
        store = dist.distributed_c10d._get_default_store()
        self._words = LocalGradients(self._group, store, self._name, inspector.word_of, inspector.client)
        self.has_said = self._is_settled = self._has_hook = False
        self._which = ""  # ranks have a hook, while others have none
        self._left, self._shows_until = 0, 0.0

    @property
    def _store(self) -> dist.Store:
        store = self._dog.client or dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"minddp/{self._name}", store)

    def count(self, hook: str | None) -> None:
        """In the first synchronized backward. ``hook``: this rank's."""
        self.has_said, self._has_hook = True, hook is not None
        with suppress(dist.DistError):  # the store's host has left
            if hook is not None:
                self._store.set(str(self._group.rank()), hook)
            count, slept = self._store.add("ranks", 1 if hook is None else _WITH), 0.0
            while not self._settles(count) and slept < _PATIENCE * times.look:
                pause = min(0.001 + slept / 4, times.look / 4)
                time.sleep(pause)
                slept += pause
                count = self._store.add("ranks", 0)

    def _settles(self, count: int) -> bool:
        some, others = divmod(count, _WITH)
        if some and others:
            ranks = [rank for rank in range(self._group.size()) if self._store.check([str(rank)])]
            hooks = sorted({self._store.get(str(rank)).decode() for rank in ranks})
            self._suspect(f"{ranks_text(ranks)} ({', '.join(hooks)})")
        self._is_settled = bool(self._which) or some + others == self._group.size()
        return self._is_settled

    def _suspect(self, which: str) -> None:
        self._which, self._left = which, _COMPARED
        log.warning("%s", self._refusal())

    def note_hook(self, iteration: int) -> None:
        """A hook takes the place of the reducer's own all-reduce. ``iteration``: how many have begun."""
        if self.has_said and not self._has_hook:
            self._dog.tell_of_hook(self._name, iteration + 1, self._group.rank())
            self._has_hook, self._shows_until = True, time.monotonic() + _PROBATION * times.look

    def forget(self) -> None:
        """There is no hook any more."""
        self._has_hook, self._which, self._left = False, "", 0
        self._dog.hooks.pop(self._name, None)

    def may_differ(self) -> bool:
        open_question = self.has_said and not self._is_settled
        return bool(open_question or self._left or self._shows_until or self._name in self._dog.hooks)

    def look(self, iteration: int) -> None:
        """Before a step, or a forward. ``iteration``: how many have begun."""
        begins, rank = self._dog.hooks.get(self._name, (0, 0))
        if begins and (self._has_hook or iteration >= begins):
            self._dog.hooks.pop(self._name)
            if not self._has_hook:
                self._suspect(f"rank {rank}, from iteration {begins} on")
        if self.has_said and not self._is_settled:
            with suppress(dist.DistError):
                self._settles(self._store.add("ranks", 0))

    def check(self, averages: Sequence[tuple[str, torch.Tensor]], iteration: int) -> None:
        """Before a step with ``averages``.

        Raises:
            RuntimeError: they differ between ranks.
        """
        self.look(iteration)
        if time.monotonic() > self._shows_until:
            self._shows_until = 0.0
        if not (self._left or self._shows_until):
            return
        uses, self._left = self._left > 0, max(0, self._left - 1)
        try:
            self._words.check(averages, iteration, iteration, uses)
        except Differ as error:
            if error.waited is None:  # a rank that has shown none may have nothing to compare with
                raise RuntimeError(self._refusal()) from None

    def _refusal(self) -> str:
        return (
            f"DistributedDataParallel on rank {self._group.rank()}: only some ranks have a communication hook: "
            f"{self._which}. Where it does not give the mean, the replicas drift apart, and the step is refused. "
            "Register the hook on all ranks, before the same iteration."
        )
