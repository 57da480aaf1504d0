"""May ``optimizer.step()`` use the gradients that there are? Asked before each step of any optimizer.

Refused are gradients that would let the replicas drift apart without a word: of a backward that is not over, that an
exception has ended, or that bypassed the wrapper and differs between ranks (``local_gradients.py``). Suspected are
those that a program may have left local by mistake (:data:`_SUSPECTS`): where they differ between ranks, that is
logged, once. Until a step uses them nothing is wrong: the next synchronized backward averages what is in ``.grad``.

A closure makes the gradients inside of ``step()``: then this is asked after each of its calls. Torch's hooks for all
optimizers are placed with the first wrapper, not at import.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from ..logs import log
from ..parameters import plainly
from .local_gradients import Differ, has_values, refusal


class Guarded:
    """Reduces parameters, and is asked before they are stepped."""

    def is_over(self) -> bool:
        """Whether nothing is reduced any more."""
        return False

    def may_refuse_step(self) -> bool:
        """Whether :meth:`check_step` is worth its time; costs a microsecond."""
        raise NotImplementedError

    def parameter_ids(self) -> set[int]:
        raise NotImplementedError

    def check_step(self, stepped: set[int], others: Sequence[Guarded]) -> bool:
        """Raises if an optimizer must not use the gradients; returns whether its step is to change nothing.

        Args:
            stepped: ``id`` of each of the optimizer's parameters.
            others: who else reduces parameters, the same ones perhaps.
        """
        raise NotImplementedError

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether its gradient of that backward, or of a later one, was averaged here."""
        return False

    def has_brought(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether it came through this one's forward, in that backward or a later one."""
        return False

    def note_versions(self) -> set[int]:
        """Before an optimizer's first compiled step."""
        return set()

    def yield_ownership(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Another has been made around some of ``parameters``: it cares for them."""


# In the order in which they were made, which is the same on all ranks: checks exchange words.
_watched: weakref.WeakValueDictionary[int, Guarded] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()
_refused: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def watch(guarded: Guarded) -> None:
    """From now on, until it is gone."""
    _look_at_steps()
    with _lock:
        _watched[next(_numbers)] = guarded


def watched() -> list[Guarded]:
    """All that :func:`watch` was given and that still reduce something."""
    with _lock:
        everyone = list(_watched.values())
    return [guarded for guarded in everyone if not guarded.is_over()]


def refuse(parameter: torch.Tensor, why: str) -> None:
    """No optimizer may step this one any more: another tensor has its place in the module, and its gradients."""
    _look_at_steps()
    key = id(parameter)
    _refused[key] = weakref.ref(parameter, lambda _: _refused.pop(key, None)), why


# --- one wrapper's answer ---


class StepCheck(Guarded):
    """Asked for one wrapper.

    Args:
        guards: the wrapper's :class:`minddp.guards.observer.Guards`. Kept weakly.
    """

    def __init__(self, guards: Any):
        self._guards = weakref.ref(guards)
        self._process = os.getpid()
        self._settled: set[str] = set()  # kinds of local gradients that are asked about no more
        self._named: dict[str, str] = {}  # the kind of each that ranks have been asked about
        self._versions: dict[int, int] = {}  # of the parameters, at the last forward after a step was compiled

    @property
    def guards(self) -> Any:
        return self._guards()

    @property
    def averager(self) -> Any:
        guards = self._guards()
        return None if guards is None else guards.averager

    def is_over(self) -> bool:
        return self.averager is None

    def parameter_ids(self) -> set[int]:
        averager = self.averager
        return set() if averager is None else averager.parameter_ids()

    def may_refuse_step(self) -> bool:
        guards, averager = self.guards, self.averager
        if averager is None:
            return False
        unsure = (
            guards.finite is not None or guards.inspector.lost is not None or guards.words.interrupted is not None
        )
        return unsure or bool(averager.reducer.bypassed() or self._suspects()) or averager.is_unfinished()

    def check_step(self, stepped: set[int], others: Sequence[Guarded]) -> bool:
        held = self.averager  # garbage collection may run at any moment
        if held is None:
            return False
        self.guards.inspector.check_lost()
        if not self._has_others():
            return self.averager.group.size() == 1 and self.guards.finite is not None and self.guards.finite.check()
        self.averager.report_failure(lambda: self._check_whole(stepped, others))
        skips = self.guards.finite is not None and self.guards.finite.check()
        self.averager.report_failure(lambda: self._check_local(stepped, others))
        return skips

    def note_versions(self) -> set[int]:
        """``id`` of each parameter that has been written to since this was called before."""
        averager = self.averager
        before, self._versions = self._versions, _versions(averager.parameters.reduced)
        return {key for key, version in self._versions.items() if before.get(key, version) != version}

    def check_compiled_steps(self) -> None:
        """At a forward: looks at the gradients that compiled steps may have used. What must be refused for certain
        is refused at each forward anyway."""
        if _has_compiled and (stepped := self.note_versions()) and self.may_refuse_step() and self._has_others():
            self._check_local(stepped, [other for other in watched() if other is not self], is_certain=False)

    def _has_others(self) -> bool:
        """Whether there are ranks whose parameters could become others than this one's: not in a group of one, nor
        once it is destroyed, nor in a process that was forked from the one that had it."""
        if self.averager.group.size() == 1 or self._process != os.getpid():
            return False
        return self.averager.has_foreign_group or self.averager.group in dist.distributed_c10d._world.pg_map

    def _check_whole(self, stepped: set[int], others: Sequence[Guarded]) -> None:
        """Raises if a backward is not over whose gradients would be used, or an exception has ended it; and if one
        has ended the last step, on this rank alone."""
        reducer = self.averager.reducer
        if reducer.in_backward() and self.averager.hook is not None:
            return  # the hook steps with what it has reduced; so does a callback of its future, on any thread
        if reducer.in_backward() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "optimizer.step() inside of backward() would use gradients before they are averaged over ranks: step "
                "after backward, or in a communication hook (torch's _apply_optimizer_in_backward does)."
            )
        self.guards.words.check_interrupted(reducer.iteration())
        is_partial = reducer.phase() in (_C.Phase.BACKWARD, _C.Phase.INCOMPLETE) or reducer.is_interrupted()
        if is_partial and all(self._is_averaged(i, p, others) for i, p in self._with_gradients(stepped)):
            return
        reducer.check_finished()
        names, used = (
            self.averager.parameters.names,
            self._with_gradients(stepped) if reducer.is_interrupted() else [],
        )
        found = [names[i] for i, _ in used if not reducer.averaged_since(i, 0)]
        if found:  # the program has caught the exception
            raise RuntimeError(
                f"optimizer.step() on rank {self.averager.group.rank()} would use gradients that were never "
                f"averaged, of {found[:10]}: an exception has ended their backward. Call zero_grad() first, on every "
                "rank, or restart from a checkpoint."
            )

    def _with_gradients(self, stepped: set[int]) -> list[tuple[int, torch.nn.Parameter]]:
        """Without those that were set to None, or zeroed: an optimizer passes over them."""
        reduced = enumerate(self.averager.parameters.reduced)
        return [(i, p) for i, p in reduced if id(p) in stepped and p.grad is not None and has_values(p.grad)]

    def _is_averaged(self, index: int, parameter: torch.nn.Parameter, others: Sequence[Guarded]) -> bool:
        """By another wrapper: the whole of its gradient."""
        return any(other.has_averaged(parameter, self.averager.reducer.touched_in(index)) for other in others)

    def _suspects(self) -> dict[int, str]:
        """Parameters, by index, whose gradients this rank may have alone, and why."""
        return {i: kind for i, kind in self.averager.reducer.suspects() if kind not in self._settled}

    def _check_local(self, stepped: set[int], others: Sequence[Guarded], is_certain: bool = True) -> None:
        """Raises if gradients that bypassed the wrapper differ between ranks. If others do that a program may have
        left local, or if it is not certain that they are stepped, it says so in the log."""
        reducer, parameters = self.averager.reducer, self.averager.parameters.reduced
        is_certain = is_certain and (self.averager.hook is None or self.averager.has_builtin_hook)
        kinds = {i: kind for i, kind in self._suspects().items() if not self._is_averaged(i, parameters[i], others)}
        left = [reducer.names[i] for i, _ in self._with_gradients(stepped) if kinds.get(i) == "left_local"]
        if left:  # which is known without the other ranks
            log.warning(_LOCAL, self.averager.group.rank(), left[:10], _SUSPECTS["left_local"], "logged once")
            self._settled.add("left_local")
        kinds = {i: kind for i, kind in kinds.items() if kind != "left_local"}
        bypassed = dict(reducer.bypassed() if "bypassed" not in self._settled else ())
        for i, backward in bypassed.items():
            if not any(other.has_brought(parameters[i], backward) for other in others):
                kinds[i] = "bypassed"
        # All of them, since ranks need not step the same ones (ZeroRedundancyOptimizer).
        named = {
            reducer.names[i]: (kind, parameters[i]) for i, kind in kinds.items() if parameters[i].grad is not None
        }
        moment = max(bypassed.values(), default=-1), reducer.iteration(), *sorted({*kinds.values()})
        uses = any(id(p) in stepped for _, p in named.values())
        differing: dict[str, list[str]] = {}
        try:
            gradients = [(name, p.grad) for name, (_, p) in named.items()]
            self._named |= {name: kind for name, (kind, _) in named.items()}
            words = self.guards.words
            if "bypassed" in kinds.values():
                compared = words.check(gradients, moment, reducer.iteration(), uses)
            else:
                compared = uses and words.check_later(gradients, moment, reducer.iteration())
            if not compared:
                return
        except Differ as error:
            how = error.how
            for name in error.names:
                differing.setdefault(self._named[name], []).append(name)
            if "bypassed" in differing and is_certain:
                raise RuntimeError(refusal(error)) from None
        for kind, which in differing.items():
            log.warning(_LOCAL, self.averager.group.rank(), which[:10], _SUSPECTS[kind], how)
        self._settled |= {*kinds.values()} - {"bypassed"} | differing.keys()

    def last_averages(self) -> tuple[set[int], int]:
        """``id`` of each parameter with an average of the last backward, and when that ended (monotonic, ns)."""
        step = self.averager.reducer.last_step()
        reduced = self.averager.parameters.reduced
        return {id(p) for p, ns in zip(reduced, step["ready_ns"]) if ns >= 0}, step["backward_end_ns"]

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        averager = self.averager  # held, since garbage collection may run at any moment
        index = _index(averager, parameter)
        return index is not None and averager.reducer.averaged_since(index, backward)

    def has_brought(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        averager = self.averager
        index = _index(averager, parameter)
        return index is not None and averager.reducer.arrived_in(index) >= backward


def _index(averager: Any, parameter: torch.nn.Parameter) -> int | None:
    reduced = () if averager is None else averager.parameters.reduced
    return next((i for i, mine in enumerate(reduced) if mine is parameter), None)


_LOCAL = "DistributedDataParallel: optimizer.step() on rank %d uses gradients of this rank alone, of %s: %s (%s)"
_SUSPECTS = {
    "left_local": "their forward ran inside of no_sync(), and backward() outside of it. As in torch, where forward "
    "ran decides. Put both inside, or both outside.",
    "mixed": "a backward under no_sync() has added its own to the average of an earlier one. The last backward "
    "before a step is to run outside of no_sync(): it averages all that was accumulated.",
    "assigned": "no backward has brought them, but torch.autograd.grad and an assignment perhaps, and a forward of "
    "the wrapper's waits for its backward. Call backward(), or average them; or run that forward under no_sync().",
    "bypassed": "their backward ran past the wrapper, or the communication hook leaves gradients local.",
}  # the last is a suspicion with a communication hook of the program's, or after a compiled step; otherwise it raises


# --- torch's hooks on all optimizers ---

_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial
_STAND_IN = "_minddp_closure"  # (a closure, what the optimizer gets for it in each step)


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


_has_compiled = False


def _note_compiled() -> None:
    """A compiled step calls nobody: from now on each forward looks at what steps have done before it."""
    global _has_compiled
    _has_compiled = True
    for guarded in watched():
        guarded.note_versions()


_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # what Dynamo traces of this is only what follows
        return _note_compiled()
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


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _steps_of(optimizer).end()
    closure = _closure_of(optimizer, args, kwargs)
    if closure is not None and not isinstance(closure, _FUNCTIONS):
        _check(optimizer)


def _check(optimizer: torch.optim.Optimizer) -> None:
    everyone = watched()
    asked = [guarded for guarded in everyone if guarded.may_refuse_step()]
    stepped = _parameters(optimizer) if asked or _refused else set()
    for key in stepped & _refused.keys():
        raise RuntimeError(_refused[key][1])
    for guarded in asked:
        if not stepped.isdisjoint(guarded.parameter_ids()):
            if guarded.check_step(stepped, [other for other in everyone if other is not guarded]):
                for parameter in _listed(optimizer):  # without gradients a step changes nothing
                    parameter.grad = None


def _closure_of(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The closure that a step was called with, if it makes gradients that are asked for. What else an optimizer of
    the user's takes in its place, a module say, is none."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if given is None or not callable(given):
        return None
    stepped = _parameters(optimizer)
    if all(stepped.isdisjoint(guarded.parameter_ids()) for guarded in watched()):
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


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return set(map(id, _listed(optimizer)))


def _listed(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """None of a program's own optimizer whose groups have another shape."""
    try:
        listed: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in listed if isinstance(p, torch.Tensor)]  # type: ignore[misc]
    except Exception:
        return []


# --- steps that an exception ends ---


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
            self.versions = _versions(_listed(optimizer))

    def end(self) -> None:
        global _spent_ns
        self.ended_ns = time.monotonic_ns()
        if self.begun == 1:
            _spent_ns += self.ended_ns - self.begun_ns
        self.begun = max(0, self.begun - 1)

    def leaves_unchanged(self, averaged: set[int], averaged_ns: int) -> bool:
        """Whether a step that has begun and not ended has left parameters as they were that it had averages for. It
        has not if all have changed, by this step or when it was tried again; nor if none has, and there was nothing
        new to step with."""
        optimizer = self.optimizer()
        listed = [] if optimizer is None else [p for p in _listed(optimizer) if id(p) in averaged]
        self.begun *= not listed
        changed = [version != self.versions.get(key) for key, version in _versions(listed).items()]
        return not all(changed) and (any(changed) or averaged_ns > self.ended_before_ns)


_steps: dict[int, _Steps] = {}  # by id: an optimizer of the program's may not be hashable
_spent_ns = 0


def spent_ns() -> int:
    """Nanoseconds that all optimizers' steps have taken in this process so far, since the first wrapper was made."""
    return _spent_ns


def _steps_of(optimizer: torch.optim.Optimizer) -> _Steps:
    return _steps.get(id(optimizer)) or _steps.setdefault(id(optimizer), _Steps(optimizer))


def interrupted(averages: Callable[[], tuple[set[int], int]]) -> bool:
    """Whether a step has begun and not ended, and has left some parameters as they were. Each such step is reported
    once. None is inside of a step's closure.

    Args:
        averages: answers which parameters (``id``) have an average of the last backward, and when that ended
            (:func:`time.monotonic_ns`).
    """
    found = False
    for steps in list(_steps.values()):
        if steps.begun:
            found |= steps.leaves_unchanged(*averages())
    return found


def _versions(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    """By ``id``: how often each was written to."""
    with plainly():
        return {id(p): 0 if p.is_inference() else p._version for p in parameters}
