"""May ``optimizer.step()`` use the gradients that there are? Asked before each step of any optimizer.

Refused are gradients that would let the replicas drift apart without a word: of a backward that is not over, that an
exception has ended, or that bypassed the wrapper and differs between ranks (``words.py``). What a program
may have left local by mistake is logged, once (:data:`_LOCAL`). Until a step uses them nothing is wrong: the next
synchronized backward averages what is in ``.grad``.

A closure makes the gradients inside of ``step()``: then this is asked when the step is over. Torch's hooks for all
optimizers are placed with the first wrapper, not at import.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from ..logs import log
from ..messages import is_torchs
from .words import has_values

# In the order in which they were made, which is the same on all ranks: checks exchange words.
_watched: weakref.WeakValueDictionary[int, StepCheck] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def watch(check: StepCheck) -> None:
    """From now on, until it is gone."""
    _look_at_steps()
    with _lock:
        _watched[next(_numbers)] = check


def watched() -> list[StepCheck]:
    """All that :func:`watch` was given and whose wrapper is there."""
    with _lock:
        everyone = list(_watched.values())
    return [check for check in everyone if check.averager is not None]


# --- one wrapper's answer ---


class StepCheck:
    """Asked for one wrapper.

    Args:
        guards: the wrapper's :class:`minddp.guards.observer.Guards`. Kept weakly.
    """

    def __init__(self, guards: Any):
        self._guards = weakref.ref(guards)
        self._process = os.getpid()
        self._has_told = False  # of gradients that may be this rank's alone

    @property
    def guards(self) -> Any:
        return self._guards()

    @property
    def averager(self) -> Any:
        guards = self._guards()
        return None if guards is None else guards.averager

    def parameter_ids(self) -> set[int]:
        averager = self.averager
        return set() if averager is None else averager.parameter_ids()

    def asked_of(self) -> set[int]:
        """``id`` of each parameter whose step this one is asked about."""
        guards = self.guards
        strangers = () if guards is None or guards.averager is None else guards.changes.strangers()
        return self.parameter_ids() | {id(parameter) for _, parameter in strangers}

    def may_refuse_step(self) -> bool:
        """Whether :meth:`check_step` is worth its time; costs a microsecond."""
        guards, averager = self.guards, self.averager
        if averager is None:
            return False
        unsure = guards.finite is not None or guards.watch.lost is not None or averager.is_unfinished()
        return bool(unsure or guards.changes.found or averager.reducer.bypassed() or self._suspects())

    def check_step(self, stepped: set[int], others: Sequence[StepCheck], is_over: bool) -> bool:
        """Raises if an optimizer must not use the gradients; returns whether its step is to change nothing.

        Args:
            stepped: ``id`` of each of the optimizer's parameters.
            others: of other wrappers, which may reduce the same parameters.
            is_over: the step has been made, with the gradients of its closure.
        """
        guards, averager = self.guards, self.averager  # held: garbage collection may run at any moment
        if averager is None:
            return False
        guards.watch.check_lost()
        finite = guards.finite
        if not self._has_others():
            return averager.group.size() == 1 and finite is not None and finite.check(is_over)
        averager.report_failure(lambda: self._check_whole(stepped, others))
        skips = finite is not None and finite.check(is_over)
        averager.report_failure(lambda: self._check_local(stepped, others))
        return skips

    def _has_others(self) -> bool:
        """Whether there are ranks whose parameters could become others than this one's: not in a group of one, nor
        once it is destroyed, nor in a process that was forked from the one that had it."""
        if self.averager.group.size() == 1 or self._process != os.getpid():
            return False
        return self.averager.has_foreign_group or is_torchs(self.averager.group)

    def _check_whole(self, stepped: set[int], others: Sequence[StepCheck]) -> None:
        """Raises if a backward is not over whose gradients would be used, or an exception has ended it."""
        reducer = self.averager.reducer
        if reducer.in_backward() and self.averager.hook is not None:
            return  # the hook steps with what it has reduced; so does a callback of its future, on any thread
        if reducer.in_backward() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "optimizer.step() inside of backward() would use gradients before they are averaged over ranks: step "
                "after backward, or in a communication hook (torch's _apply_optimizer_in_backward does)."
            )
        is_partial = reducer.phase() in (_C.Phase.BACKWARD, _C.Phase.INCOMPLETE) or reducer.is_interrupted()
        if is_partial and all(self._is_averaged(i, p, others) for i, p in self._with_gradients(stepped)):
            return
        if self.guards.changes.found and self.averager.is_under_way():
            self.guards.refuse_change()
        reducer.check_finished()
        used = self._with_gradients(stepped) if reducer.is_interrupted() else []
        found = [reducer.names[i] for i, _ in used if not reducer.averaged_since(i, 0)]
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

    def _is_averaged(self, index: int, parameter: torch.nn.Parameter, others: Sequence[StepCheck]) -> bool:
        """By another wrapper: the whole of its gradient."""
        return any(other.has_averaged(parameter, self.averager.reducer.touched_in(index)) for other in others)

    def _suspects(self) -> list[int]:
        """Indices of the parameters whose gradients this rank may have alone by mistake, until that was logged."""
        return [] if self._has_told else self.averager.reducer.suspects()

    def _check_local(self, stepped: set[int], others: Sequence[StepCheck]) -> None:
        """Raises if gradients that bypassed the wrapper differ between ranks."""
        reducer, parameters = self.averager.reducer, self.averager.parameters.reduced
        suspects = {*self._suspects()}
        used = self._with_gradients(stepped) if suspects else []
        if found := [reducer.names[i] for i, p in used if i in suspects and not self._is_averaged(i, p, others)]:
            self._has_told = True
            log.warning(_LOCAL, self.averager.group.rank(), found[:10])
        if self.averager.hook is not None and not self.averager.has_builtin_hook:
            return  # which may leave gradients local on purpose
        bypassed = dict(reducer.bypassed())
        for i, backward in list(bypassed.items()):
            if parameters[i].grad is None or any(other.has_brought(parameters[i], backward) for other in others):
                del bypassed[i]
        changes, words = self.guards.changes, self.guards.words
        strangers = [(name, p.grad) for name, p in changes.strangers() if id(p) in stepped and p.grad is not None]
        if bypassed or strangers:
            # All that bypassed: ranks need not step the same ones (ZeroRedundancyOptimizer).
            named = [*((reducer.names[i], parameters[i].grad) for i in bypassed), *strangers]
            uses = bool(strangers) or any(id(parameters[i]) in stepped for i in bypassed)
            moment = max(bypassed.values(), default=-1), reducer.iteration()
            why = self.guards.change_text() if strangers else ""
            words.check(named, moment, self.guards.watch.earlier + reducer.iteration(), uses, why)

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether its gradient of that backward, or of a later one, was averaged here."""
        averager = self.averager  # held, since garbage collection may run at any moment
        index = _index(averager, parameter)
        return index is not None and averager.reducer.averaged_since(index, backward)

    def has_brought(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether it came through this one's forward, in that backward or a later one."""
        averager = self.averager
        index = _index(averager, parameter)
        return index is not None and averager.reducer.arrived_in(index) >= backward


def _index(averager: Any, parameter: torch.nn.Parameter) -> int | None:
    reduced = () if averager is None else averager.parameters.reduced
    return next((i for i, mine in enumerate(reduced) if mine is parameter), None)


_LOCAL = (
    "DistributedDataParallel: optimizer.step() on rank %d uses gradients that may be this rank's alone, of %s: a "
    "backward under no_sync() has added to them since their last average; or their forward ran inside of no_sync(), "
    "and backward() outside of it; or no backward has brought them, while a forward waits for its own. The last "
    "forward and backward before a step are to run outside of no_sync(): it averages all that was accumulated. If "
    "all ranks have the same ones, nothing is wrong. This is logged once."
)


# --- torch's hooks on all optimizers ---


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and not _has_closure(optimizer, args, kwargs):
        _check(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _has_closure(optimizer, args, kwargs):
        return
    try:
        _check(optimizer, is_over=True)
    except RuntimeError as error:
        error.args = (f"{error} {_CHANGED}",)
        raise


_CHANGED = "The step's closure made these gradients, and the step is over: this rank's weights have changed."


def _check(optimizer: torch.optim.Optimizer, is_over: bool = False) -> None:
    everyone = watched()
    asked = [check for check in everyone if check.may_refuse_step()]
    stepped = {id(p) for p in _listed(optimizer)} if asked else set()
    for check in asked:
        if not stepped.isdisjoint(check.asked_of()):
            if check.check_step(stepped, [other for other in everyone if other is not check], is_over):
                for parameter in _listed(optimizer):  # without gradients a step changes nothing
                    parameter.grad = None


def _has_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
    """What an optimizer of the user's takes in a closure's place, a module say, is none."""
    kind: Any = type(optimizer)
    given = args[1] if len(args) > 1 and _takes_closure(kind) else kwargs.get("closure")
    return callable(given)


@functools.lru_cache(64)
def _takes_closure(kind: type) -> bool:
    return list(inspect.signature(kind.step).parameters)[1:2] == ["closure"]  # type: ignore[attr-defined]


def _listed(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    """None of a program's own optimizer whose groups have another shape."""
    try:
        listed: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in listed if isinstance(p, torch.Tensor)]  # type: ignore[misc]
    except Exception:
        return []
