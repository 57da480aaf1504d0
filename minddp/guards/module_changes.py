"""Noticing that a wrapped module is not the one that was wrapped any more.

The reducer knows the parameters that required gradients at construction. One that is added, replaced or unfrozen
later gets local gradients. That does no harm until an optimizer steps it: then it is asked about as a gradient that
bypassed the wrapper (``step.py``). One that was cast or moved has no place in its bucket: the reducer refuses its
gradient. So each synchronized forward is followed by a look at all that the module's parts have registered, whether
something frozen requires a gradient, and at the dtypes and devices of some parameters in turn: less than 30 us for
400 parameters in 200 layers. Names are looked at if something differs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import torch

from ..parameters import plainly
from . import step

Named = tuple[str, torch.nn.Parameter]
_requires_grad, _kind = attrgetter("requires_grad"), attrgetter("dtype", "device")
_AT_ONCE = 64  # parameters whose dtypes and devices are looked at after one forward


def _inside_functional_call() -> bool:
    """Asked only where something has changed."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
    return False


def _has_wrapper(parameter: torch.nn.Parameter) -> bool:
    """Another one than whoever asks. Asked only where something has changed."""
    return any(id(parameter) in other.parameter_ids() for other in step.watched())


class Change(NamedTuple):
    """A parameter that is not as it was wrapped, and in what it differs."""

    parameter: weakref.ref[torch.nn.Parameter]
    name: str
    text: str


class ModuleChanges:
    """Compares ``module`` with what it was when this was made.

    Args:
        module: the wrapped module.
        named: its parameters that are not left alone, as they are at each call.
        reduced: the reducer's parameters.

    Attributes:
        found: what differed when it was looked last.
        synchronized: whether the last forward was.
    """

    def __init__(
        self, module: torch.nn.Module, named: Callable[[], Iterable[Named]], reduced: Sequence[torch.nn.Parameter]
    ):
        self._module = module
        self._named = named
        self._reduced = list(reduced)  # alive, so that no other object gets one's id
        with plainly():
            self._kinds = list(map(_kind, reduced))
        self._facts = dict(zip(map(id, reduced), self._kinds))
        self._frozen = [p for _, p in self._named() if id(p) not in self._facts]
        self._turn, self._turns = 0, max(-(-len(self._reduced) // _AT_ONCE), 1)
        self.found: list[Change] = []
        self.synchronized = True
        self._end = object()
        self._note()

    def _note(self) -> None:
        """All modules have registered these now. A dictionary's view shows what it holds at any later time."""
        registers = [register for m in self._module.modules() for register in (m._parameters, m._modules)]
        self._views = [
            *(register.values() for register in registers),
            (self._end,),
        ]  # whatever is added moves the end
        self._registered = list(chain.from_iterable(self._views))

    def _is_alike(self) -> bool:
        if not all(map(is_, chain.from_iterable(self._views), self._registered)):
            return False
        self._turn = (self._turn + 1) % self._turns
        some = slice(self._turn, None, self._turns)
        with plainly():
            is_alike = list(map(_kind, self._reduced[some])) == self._kinds[some]
        return is_alike and not any(map(_requires_grad, self._frozen))

    def look(self) -> list[Change] | None:
        """What differs now.

        Returns:
            None: nothing. Empty: nothing, but something was registered, or differed before: a parameter may have
            another autograd node.
        """
        if not self.found and self._is_alike():
            return None
        changes = self._changes()
        if changes and _inside_functional_call():  # other tensors for one call
            return None
        self.found = changes
        if not changes:
            self._note()
        return changes

    def strangers(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The module's parameters that are not the reducer's, after a synchronized forward."""
        there = [(each.name, each.parameter()) for each in self.found] if self.synchronized else []
        return [(name, p) for name, p in there if p is not None and id(p) not in self._facts]

    def _changes(self) -> list[Change]:
        changes = []
        for name, p in self._named():
            known = self._facts.get(id(p))
            # fastai's WeightDropout puts others in their place; another wrapper's are averaged there.
            if known is None and p.requires_grad and p.is_leaf and not _has_wrapper(p):
                frozen = any(p is other for other in self._frozen)
                text = f"'{name}' " + ("requires a gradient now" if frozen else "is new")
                changes.append(Change(weakref.ref(p), name, text))
            elif known is not None:
                with plainly():
                    dtype, device = p.dtype, p.device
                if (dtype, device) != known:
                    text = f"'{name}' was {known[0]} on {known[1]}, is {dtype} on {device}"
                    changes.append(Change(weakref.ref(p), name, text))
        return changes


def refusal(changes: Iterable[Change]) -> str:
    """What to say where the change has left something undone, or a step would use local gradients."""
    return (
        "DistributedDataParallel: the module has changed since it was wrapped:\n  "
        + "\n  ".join(change.text for change in changes)
        + "\nThe gradients of these would not be averaged. Call minddp.refresh(ddp) on every rank after such "
        "changes, and give new parameters to the optimizer."
    )
