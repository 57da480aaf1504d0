"""Before any ``optimizer.step()`` uses gradients, those who reduce the parameters that it would change are asked.

A closure makes the gradients inside of ``step()``: then they are asked after each of its calls. Torch's hooks for all
optimizers are taken with the first wrapper, not at import.

A step that ends with an exception, which the program catches, may leave this rank's parameters as they were, while
the others' have changed: who reduces them asks before the next forward, by :func:`interrupted`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Guarded(Protocol):
    """Who reduces parameters; ``may_refuse_step`` is asked first, and costs little."""

    def may_refuse_step(self) -> bool: ...

    def parameter_ids(self) -> set[int]: ...

    def check_step(self, stepped: set[int], others: Sequence[Guarded]) -> bool:
        """Raises where gradients must not be used; returns whether the step is to change nothing."""

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether its gradient of that backward, or of a later one, was averaged here."""

    def without_its_own(self, bypassed: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Of what was made past another, ``id`` of a parameter -> (index there, backward): what did not come here."""

    def yield_ownership(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Another has been made around some of ``parameters``: it cares for them."""


# In the order in which they were made, which is the same on all ranks: checks exchange words.
_watched: weakref.WeakValueDictionary[int, Guarded] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def watch(guarded: Guarded) -> None:
    """From now on, until it is gone."""
    _look_at_steps()
    with _lock:
        _watched[next(_numbers)] = guarded


def watched() -> list[Guarded]:
    """All that :func:`watch` was given and that are still there."""
    with _lock:
        return list(_watched.values())


_refused: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def refuse(parameter: torch.Tensor, why: str) -> None:
    """No optimizer may step this one any more: another tensor has its place in the module, and its gradients."""
    _look_at_steps()
    key = id(parameter)
    _refused[key] = weakref.ref(parameter, lambda _: _refused.pop(key, None)), why


class _Steps:
    """Of one optimizer: how many have begun and not ended (a subclass's, and its base's within; those that end with
    an exception stay), and when the last one ended."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        key = id(optimizer)
        self.optimizer = weakref.ref(optimizer, lambda _: _steps.pop(key, None))
        self.begun = self.begun_ns = self.ended_ns = 0
        self.ended_before_ns = 0  # when the last one ended before the first of the begun ones
        self.versions: dict[int, int] = {}  # of the parameters, when it began

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.begun += 1
        if self.begun == 1:
            self.begun_ns, self.ended_before_ns = time.monotonic_ns(), self.ended_ns
            self.versions = {id(p): _version(p) for p in _listed(optimizer)}

    def end(self) -> None:
        global _spent_ns
        self.ended_ns = time.monotonic_ns()
        if self.begun == 1:
            _spent_ns += self.ended_ns - self.begun_ns
        self.begun = max(0, self.begun - 1)

    def leaves_unchanged(self, averaged: set[int], averaged_ns: int) -> bool:
        """Whether a step that has begun and not ended has left parameters as they were that it had averages for. It
        has not where all have changed, by this step or when it was tried again; nor where none has, and there was
        nothing new to step with."""
        optimizer = self.optimizer()
        listed = [] if optimizer is None else [p for p in _listed(optimizer) if id(p) in averaged]
        self.begun *= not listed
        changed = [_version(p) != self.versions.get(id(p)) for p in listed]
        return not all(changed) and (any(changed) or averaged_ns > self.ended_before_ns)


_steps: dict[int, _Steps] = {}  # by id: an optimizer of the program's may not be hashable
_spent_ns = 0


def spent_ns() -> int:
    """Nanoseconds that all optimizers' steps have taken in this process so far, since the first wrapper was made."""
    return _spent_ns


def _steps_of(optimizer: torch.optim.Optimizer) -> _Steps:
    found = _steps.get(id(optimizer))
    if found is None:
        found = _steps[id(optimizer)] = _Steps(optimizer)
    return found


def interrupted(averages: Callable[[], tuple[set[int], int]]) -> bool:
    """Whether a step has begun and not ended, and has left some parameters as they were. Each such step is reported
    once. None is where a closure runs inside of a step.

    Args:
        averages: answers which parameters (``id``) have an average of the last backward, and when that ended
            (:func:`time.monotonic_ns`).
    """
    found = [steps.leaves_unchanged(*averages()) for steps in list(_steps.values()) if steps.begun]
    return any(found)


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _steps_of(optimizer).end()
    closure = _closure_of(optimizer, args, kwargs)
    if closure is not None and not isinstance(closure, _FUNCTIONS):
        _check(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure, steps = _closure_of(optimizer, args, kwargs), _steps_of(optimizer)
    if closure is None:
        _check(optimizer)
    steps.begin(optimizer)
    if not isinstance(closure, _FUNCTIONS):
        return None
    # Kept by the optimizer, which the closure mostly knows: so both can go.
    own, stand_in = vars(optimizer).get(_STAND_IN, (None, None))
    if own is not closure:
        stand_in = _checked(closure, steps)
        vars(optimizer)[_STAND_IN] = closure, stand_in
    if "closure" in kwargs:
        return args, {**kwargs, "closure": stand_in}
    return (args[0], stand_in, *args[2:]), kwargs


_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial
_STAND_IN = "_minddp_closure"  # (a closure, what the optimizer gets for it in each step)


def _closure_of(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The closure that a step was called with, if it makes gradients that are asked for. What else an optimizer of
    the user's takes in its place, a module say, is none; Dynamo traces the program's own closure, and no stand-in."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if torch.compiler.is_compiling() or not callable(given) or not _is_asked(optimizer):
        return None
    return given if isinstance(given, _FUNCTIONS) or _takes_closure(type(optimizer)) else None  # type: ignore[arg-type]


@functools.lru_cache(64)
def _takes_closure(kind: type) -> bool:
    return list(inspect.signature(kind.step).parameters)[1:2] == ["closure"]  # type: ignore[attr-defined]


def _checked(closure: Any, steps: _Steps) -> Callable[..., Any]:
    """``closure``, as the optimizer gets it: the gradients that it makes are checked before they are used. It has the
    program's own attributes. A callable object stays what it is: its gradients are checked after the step."""

    def checked(*arguments: Any, **keywords: Any) -> Any:
        begun, steps.begun = steps.begun, 0  # the closure's forward is no next one
        try:
            loss = closure(*arguments, **keywords)
        finally:
            steps.begun = begun
        optimizer = steps.optimizer()
        if optimizer is not None:
            _check(optimizer)
        return loss

    checked.__dict__ = getattr(closure, "__dict__", {})
    return checked


def _is_asked(optimizer: torch.optim.Optimizer) -> bool:
    stepped = _parameters(optimizer)
    return any(not stepped.isdisjoint(guarded.parameter_ids()) for guarded in watched())


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for p in _listed(optimizer)}


def _listed(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """None of a program's own optimizer whose groups have another shape."""
    try:
        listed: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in listed if isinstance(p, torch.Tensor)]  # type: ignore[misc]
    except Exception:
        return []


def _check(optimizer: torch.optim.Optimizer) -> None:
    if _refused:
        for key in _parameters(optimizer) & _refused.keys():
            raise RuntimeError(_refused[key][1])
    everyone = watched()
    for guarded in everyone:
        if guarded.may_refuse_step():
            stepped = _parameters(optimizer)
            if not stepped.isdisjoint(guarded.parameter_ids()):
                if guarded.check_step(stepped, [other for other in everyone if other is not guarded]):
                    _skip(optimizer)


def _skip(optimizer: torch.optim.Optimizer) -> None:
    """A step without gradients changes neither parameters nor the optimizer's state."""
    for parameter in _listed(optimizer):
        parameter.grad = None
