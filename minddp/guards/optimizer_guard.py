"""Before any ``optimizer.step()`` uses gradients, those who reduce the parameters that it would change are asked.

A closure makes the gradients inside of ``step()``: then they are asked after each of its calls. Torch's hooks for all
optimizers are taken with the first wrapper, not at import.

A step that ends with an exception, which the program catches, may leave this rank's parameters other than all
others': who reduces them asks before the next forward, by :func:`interrupted`. What tells is which parameters have
changed since.
"""

from __future__ import annotations

import collections
import copy
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

    def last_averages(self) -> tuple[set[int], int]:
        """``id`` of each parameter with an average of the last backward, and when that ended (monotonic, ns)."""

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


_COUNTED = 64


class _Steps:
    """Of one optimizer: how many have begun and not ended (a subclass's, and its base's within; those that end with
    an exception stay), and when the last ones ended."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        key = id(optimizer)
        self.optimizer = weakref.ref(optimizer, lambda _: _steps.pop(key, None))
        self.begun, self.begun_ns = 0, -1
        self.ended: collections.deque[int] = collections.deque(maxlen=_COUNTED)
        self.versions: list[int] = []  # of the parameters, when it began
        self.is_torn = False  # an exception has come out of a closure, after parameters had changed
        self.checked: _Checked | None = None

    def begin(self) -> None:
        self.begun += 1
        if self.begun == 1:
            self.begun_ns, self.versions, self.is_torn = time.monotonic_ns(), self._versions(), False

    def _versions(self) -> list[int]:
        optimizer = self.optimizer()
        return [] if optimizer is None else [_version(p) for p in _listed(optimizer)]

    def note_torn(self) -> None:
        self.is_torn = self.is_torn or self._versions() != self.versions

    def differs(self, guarded: Guarded) -> bool:
        """Whether a step that has begun and not ended leaves parameters that others, which have ended theirs, do not
        have. It does not where all that it has averages for has changed, by this step or when it was tried again; nor
        where nothing has, and there was nothing new to step with."""
        optimizer = self.optimizer()
        if optimizer is None or self.is_torn:
            return self.is_torn
        averaged, ended_ns = guarded.last_averages()
        changed = {id(p) for p, before in zip(_listed(optimizer), self.versions) if _version(p) != before}
        if not changed:
            return ended_ns > (self.ended[-1] if self.ended else 0)
        return not averaged & _parameters(optimizer) <= changed

    def end(self) -> None:
        global _spent_ns
        self.ended.append(time.monotonic_ns())
        if self.begun == 1:
            _spent_ns += self.ended[-1] - self.begun_ns
        self.begun = max(0, self.begun - 1)

    def is_of(self, ids: set[int]) -> bool:
        optimizer = self.optimizer()
        return optimizer is not None and not ids.isdisjoint(_parameters(optimizer))


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


def interrupted(guarded: Guarded) -> bool:
    """Whether a step on some of its parameters has begun and not ended, and that makes a difference. Each such step
    is reported once."""
    begun = [steps for steps in list(_steps.values()) if steps.begun]
    ids = guarded.parameter_ids() if begun else set()
    found = [steps for steps in begun if steps.is_of(ids)]
    for steps in found:
        steps.begun = 0
    return any(steps.differs(guarded) for steps in found)


def steps_since(ids: set[int], moment_ns: int) -> int:
    """How many steps on some of these parameters have ended after a moment of :func:`time.monotonic_ns`; of one
    optimizer, at most the last :data:`_COUNTED`."""
    of_them = [steps for steps in list(_steps.values()) if steps.is_of(ids)]
    return sum(ended > moment_ns for steps in of_them for ended in tuple(steps.ended))


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _steps_of(optimizer).end()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure, steps = kwargs.get("closure", args[1] if len(args) > 1 else None), _steps_of(optimizer)
    compiling = torch.compiler.is_compiling()  # Dynamo traces the program's own closure, and no stand-in
    if compiling or not _is_closure(optimizer, closure) or not _is_asked(optimizer):
        _check(optimizer)
        steps.begin()
        return None
    if steps.checked is None or steps.checked.own is not closure:
        steps.checked = _Checked(closure, steps)
    steps.begin()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": steps.checked}
    return (args[0], steps.checked, *args[2:]), kwargs


def _is_closure(optimizer: torch.optim.Optimizer, argument: Any) -> bool:
    """What else an optimizer of the user's takes in its place, a module say, is handed on as it is."""
    if isinstance(argument, (types.FunctionType, types.MethodType, functools.partial)):
        return True
    return callable(argument) and _takes_closure(type(optimizer))  # type: ignore[arg-type]


@functools.lru_cache(64)
def _takes_closure(kind: type) -> bool:
    return list(inspect.signature(kind.step).parameters)[1:2] == ["closure"]  # type: ignore[attr-defined]


def _same(value: Any) -> Any:
    return value


class _Checked:
    """A closure of the program's, as the optimizer gets it: the gradients that it makes are checked. In all else it
    is the program's own, with its attributes; the same one as long as the program passes the same."""

    __slots__ = ("__weakref__", "own", "steps")

    def __init__(self, own: Callable[..., Any], steps: _Steps):
        object.__setattr__(self, "own", own)
        object.__setattr__(self, "steps", steps)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        steps = self.steps
        begun, steps.begun = steps.begun, 0  # the closure's forward is no next one
        try:
            loss = self.own(*arguments, **keywords)
        except BaseException:
            steps.begun = begun
            steps.note_torn()
            raise
        optimizer = steps.optimizer()
        if optimizer is not None:
            _check(optimizer)
        steps.begun = begun
        return loss

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or self.own == other

    def __hash__(self) -> int:
        return hash(self.own)

    def __copy__(self) -> Callable[..., Any]:
        return copy.copy(self.own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.own, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _same, (self.own,)


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
