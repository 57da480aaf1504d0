"""Noticing that a wrapped module is not the one that was wrapped any more.

The reducer knows the parameters that required gradients at construction. One that is added, replaced, unfrozen, cast
or moved later would get local gradients, and the replicas would drift apart without a word. A forward with such a
parameter does no harm: the reducer refuses the backward that would bring its gradient (csrc/cases/changed_module.h).
Looking at every parameter after each forward would cost what DDP is to save, so it is done only when there is a
reason: torch tells of each registration in any module, lists of modules grow, and a cast or a move shows in whichever
parameter is looked at.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from . import optimizer_guard

_registrations = 0  # of parameters and submodules, in all modules of this process, and functional calls
Named = tuple[str, torch.nn.Parameter]
_requires_grad = attrgetter("requires_grad")


def _look_again(*_: object) -> None:
    """At all of each module, after its next forward."""
    global _registrations
    _registrations += 1


@functools.cache
def _look_at_registrations() -> None:
    """With the first wrapper, not at import: torch's hooks for all modules of the process."""
    register_module_parameter_registration_hook(_look_again)
    register_module_module_registration_hook(_look_again)


def _inside_functional_call() -> bool:
    """Asked only where something has changed."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
    return False


def _looks_up(parameters: Any) -> Callable[[str], object]:
    """What finds a parameter by its name. A scripted module's container is no dictionary."""
    if isinstance(parameters, dict):
        return parameters.get
    return lambda name: parameters[name] if name in parameters else None


def _has_wrapper(parameter: torch.nn.Parameter) -> bool:
    """Another one than whoever asks. Asked only where something has changed."""
    return any(id(parameter) in other.parameter_ids() for other in optimizer_guard.watched())


class Change(NamedTuple):
    """A parameter that is not as it was wrapped, and in what it differs."""

    parameter: torch.nn.Parameter
    text: str


class ModuleChanges:
    """Compares ``module`` with what it was when this was made.

    Args:
        module: the wrapped module.
        named: its parameters that are not left alone, as they are at each call.
        reduced: the reducer's parameters.
    """

    def __init__(
        self, module: torch.nn.Module, named: Callable[[], Iterable[Named]], reduced: Sequence[torch.nn.Parameter]
    ):
        _look_at_registrations()
        self._module = module
        self._named = named
        self._facts = {id(p): (p.dtype, p.device) for p in reduced}
        self._reduced = list(reduced)  # alive, so that no other object gets one's id
        first = reduced[0]
        # Where the module only tells of its parameters and has registered none, there is no place to look at.
        self._turns = itertools.cycle(self._places() or [(lambda _: first, "", first)])
        lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
        # ModuleList.insert registers nothing.
        self._lists = [m._modules for m in module.modules() if isinstance(m, lists)]
        self._length = sum(map(len, self._lists))
        self._frozen = [p for _, p in self._named() if id(p) not in self._facts]
        self._seen = _registrations
        self._differs = False

    def _places(self) -> list[tuple[Callable[[str], object], str, torch.nn.Parameter]]:
        """Where each of the reducer's parameters stands, and its name there."""
        return [
            (_looks_up(module._parameters), name, p)
            for module in self._module.modules()
            for name, p in module._parameters.items()
            if p is not None and id(p) in self._facts
        ]

    def look(self) -> list[Change] | None:
        """Where nothing has changed: one look at each parameter that takes no part, and at each list of modules.

        Returns:
            All that differs now. None: nothing, as far as that look tells. Empty: nothing, but something was
            registered, or differed before: a parameter may have another autograd node.
        """
        look_up, name, one = next(self._turns)
        alike = (one.dtype, one.device) == self._facts[id(one)] and not any(map(_requires_grad, self._frozen))
        if alike and not self._differs:
            length = sum(map(len, self._lists))
            if self._seen == _registrations and self._length == length and look_up(name) is one:
                return None
        changes = self._changes()
        if changes and _inside_functional_call():  # other tensors for one call
            _look_again()
            return None
        self._differs = bool(changes)
        if not changes:
            self._seen, self._length = _registrations, sum(map(len, self._lists))
        return changes

    def _changes(self) -> list[Change]:
        changes = []
        for name, p in self._named():
            known = self._facts.get(id(p))
            # fastai's WeightDropout puts others in their place; another wrapper's are averaged there.
            if known is None and p.requires_grad and p.is_leaf and not _has_wrapper(p):
                frozen = any(p is other for other in self._frozen)
                changes.append(Change(p, f"'{name}' " + ("requires a gradient now" if frozen else "is new")))
            elif known is not None and (p.dtype, p.device) != known:
                changes.append(Change(p, f"'{name}' was {known[0]} on {known[1]}, is {p.dtype} on {p.device}"))
        return changes


def refusal(changes: Iterable[Change]) -> str:
    """What to say to a backward that would bring a gradient of one of these."""
    return (
        "DistributedDataParallel: the module has changed since it was wrapped:\n  "
        + "\n  ".join(change.text for change in changes)
        + "\nThe gradients of these would not be averaged. Call minddp.refresh(ddp) on every rank after such "
        "changes, and give new parameters to the optimizer."
    )
