"""Whether an optimizer may use the gradients that there are: asked before each of its steps.

Refused are gradients that would let the replicas drift apart without a word: of a backward that is not over, that an
exception has ended, or that bypassed the wrapper and differs between ranks. Logged are those of a backward that ran
outside of its forward's ``no_sync()``: until a step uses them nothing is wrong, since the next synchronized backward
averages them, as in a pipeline whose micro-batches are forwarded before the first goes back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..logs import log
from ..parameters import Parameters
from ..reducer import Reducer
from . import optimizer_guard
from .finite_check import FiniteCheck
from .local_gradients import LocalGradients, has_values
from .stall_inspector import StallInspector


class StepCheck:
    """The part of :class:`Engine` that the optimizers' guard asks."""

    group: dist.ProcessGroup
    parameters: Parameters
    reducer: Reducer
    finite: FiniteCheck | None
    inspector: StallInspector | None
    hook: tuple[Any, Any] | None
    has_foreign_group: Any
    has_builtin_hook: Any
    report_failure: Callable[[Callable[[], Any]], Any]
    _is_unfinished: Callable[[], bool]
    _local_gradients: LocalGradients

    def __init__(self) -> None:
        self._process = os.getpid()
        self._has_warned_of_bypassed = self._has_warned_of_local = False

    def may_refuse_step(self) -> bool:
        """Whether :meth:`check_step` is worth its time; costs a microsecond."""
        local = self.reducer.bypassed() or self.reducer.left_local()
        lost = self.inspector is not None and self.inspector.lost is not None
        return lost or self._is_unfinished() or self.finite is not None or bool(local)

    def check_step(self, stepped: set[int], others: Sequence[optimizer_guard.Guarded]) -> bool:
        """Raises where an optimizer must not use the gradients; returns whether its step is to change nothing.

        Args:
            stepped: ``id`` of each of the optimizer's parameters.
            others: who else reduces parameters, the same ones perhaps.
        """
        self.check_lost()
        if not self._has_others():
            return self.group.size() == 1 and self.finite is not None and self.finite.check()
        self.report_failure(self._check_not_within)
        # It steps with what it has reduced; so does a callback of its future, on any thread.
        by_hook = self.hook is not None and self.reducer.in_backward()
        if not by_hook and not self._uses_nothing_unfinished(stepped, others):
            self.report_failure(self.reducer.check_finished)
            self.report_failure(lambda: self._check_not_interrupted(stepped))
        skips = self.finite is not None and self.finite.check()
        self._look_at_local(stepped, others)
        names, parameters = self.parameters.names, self.parameters.reduced
        bypassed = {id(parameters[i]): (i, backward) for i, backward in self.reducer.bypassed()}
        for other in others if bypassed else ():
            bypassed = other.without_its_own(bypassed)
        if bypassed:  # all of them, since ranks need not step the same ones (ZeroRedundancyOptimizer)
            found = [(names[i], parameters[i].grad) for i, _ in bypassed.values()]
            named = [(name, gradient) for name, gradient in found if gradient is not None]
            last = max(backward for _, backward in bypassed.values())
            iteration = self.reducer.iteration()
            uses = not bypassed.keys().isdisjoint(stepped)
            self._check_bypassed(lambda: self._local_gradients.check(named, last, iteration, uses))
        return skips

    def check_lost(self) -> None:
        """Raises LostPeer where the group was given up while its device may have gone on."""
        if self.inspector is not None:
            self.inspector.check_lost()

    def _check_bypassed(self, check: Callable[[], None]) -> None:
        """A hook of the program's may leave gradients local on purpose (local SGD): a difference proves nothing."""
        if self.hook is None or self.has_builtin_hook:
            self.report_failure(check)
            return
        try:
            check()
        except RuntimeError as error:
            if not self._has_warned_of_bypassed:
                log.warning("%s Or the communication hook leaves gradients local: the step goes on.", error)
            self._has_warned_of_bypassed = True

    def _look_at_local(self, stepped: set[int], others: Sequence[optimizer_guard.Guarded]) -> None:
        """Warns once, in the log: a program may have made warnings errors."""
        left = set() if self._has_warned_of_local else set(self.reducer.left_local())
        found = [
            self.parameters.names[i]
            for i, p in (self._with_gradients(stepped) if left else ())
            if i in left and not any(other.has_averaged(p, self.reducer.touched_in(i)) for other in others)
        ]
        if found:
            self._has_warned_of_local = True
            log.warning(_LOCAL, self.group.rank(), found[:10])

    def last_averages(self) -> tuple[set[int], int]:
        """``id`` of each parameter with an average of the last backward, and when that ended (monotonic, ns)."""
        step = self.reducer.last_step()
        reduced = self.parameters.reduced
        return {id(p) for p, ns in zip(reduced, step["ready_ns"]) if ns >= 0}, step["backward_end_ns"]

    def _has_others(self) -> bool:
        """Whether there are ranks whose parameters could become others than this one's: not in a group of one, nor
        once it is destroyed, nor in a process that was forked from the one that had it."""
        if self.group.size() == 1 or self._process != os.getpid():
            return False
        return self.has_foreign_group or self.group in dist.distributed_c10d._world.pg_map

    def _check_not_within(self) -> None:
        """Where gradients are averaged at the end of backward, and nobody steps in a hook after that."""
        within = self.reducer.in_backward() and torch._C._current_graph_task_id() != -1
        if within and self.hook is None:
            raise RuntimeError(
                "optimizer.step() inside of backward() would use gradients before they are averaged over ranks: step "
                "after backward, or in a communication hook (torch's _apply_optimizer_in_backward does)."
            )

    def _check_not_interrupted(self, stepped: set[int]) -> None:
        """After an exception that the program caught: what has arrived is this rank's own, unless a later backward
        has averaged it."""
        if not self.reducer.interrupted():
            return
        own = [i for i, _ in self._with_gradients(stepped) if not self.reducer.averaged_since(i, 0)]
        found = [self.parameters.names[i] for i in own]
        if found:
            raise RuntimeError(
                f"optimizer.step() on rank {self.group.rank()} would use gradients that were never averaged, of "
                f"{found[:10]}: an exception has ended their backward. Call zero_grad() first, on every rank, or "
                "restart from a checkpoint."
            )

    def _with_gradients(self, stepped: set[int]) -> list[tuple[int, torch.nn.Parameter]]:
        reduced = enumerate(self.parameters.reduced)
        return [(i, p) for i, p in reduced if id(p) in stepped and p.grad is not None and has_values(p.grad)]

    def _uses_nothing_unfinished(self, stepped: set[int], others: Sequence[optimizer_guard.Guarded]) -> bool:
        """Of an unfinished iteration: whether other wrappers have averaged the whole of each gradient to be used; and
        where they were set to None there is none, which an optimizer passes over."""
        if self.reducer.phase() not in (_C.Phase.BACKWARD, _C.Phase.INCOMPLETE) and not self.reducer.interrupted():
            return False
        return all(
            any(other.has_averaged(p, self.reducer.touched_in(i)) for other in others)
            for i, p in self._with_gradients(stepped)
        )

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        """Whether its gradient of that backward, or of a later one, was averaged here."""
        index = next((i for i, mine in enumerate(self.parameters.reduced) if mine is parameter), None)
        return index is not None and self.reducer.averaged_since(index, backward)

    def without_its_own(self, bypassed: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Of another wrapper's bypassed gradients, those that did not come through this one's forward."""
        mine = {id(p): i for i, p in enumerate(self.parameters.reduced)}
        return {
            key: (index, backward)
            for key, (index, backward) in bypassed.items()
            if key not in mine or self.reducer.arrived_in(mine[key]) < backward
        }


_LOCAL = (
    "DistributedDataParallel: optimizer.step() on rank %d uses gradients of this rank alone, of %s: their forward "
    "ran inside of no_sync(), and backward() outside of it. As in torch, where forward ran decides. Put both "
    "inside, or both outside."
)
