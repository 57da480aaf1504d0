"""When each guard has its turn in the life of one wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .. import events
from .._C import guards as cases
from ..logs import log
from ..reducer import Plan, weakly
from . import step, watchdog
from .check import compare
from .finite_check import FiniteCheck
from .lost import Watch
from .module_changes import ModuleChanges, refusal
from .processes import Process, here
from .step import StepCheck
from .words import Words

FINITE_MODES = ("raise", "warn", "skip")


class Settings(NamedTuple):
    check_finite: str | None
    check_replicas_every: int | None


class Guards(events.Observer):
    """What watches over one wrapper. All but ``steps`` is made anew with each reducer.

    Attributes:
        watch: watches its waits. None before there is a reducer, and if all parameters are reduced apart.
        words: what ranks compare before a step. None likewise.
        finite: with ``check_finite``.
        changes: notices that the module is not as it was wrapped.
        steps: asked before optimizers' steps.
    """

    changes: ModuleChanges
    name = "guards"
    options = {"check_finite": False, "check_replicas_every": None}
    left = {
        "desync_timeout": "A rank that is only late is waited for until the group's timeout: "
        "process_group=dist.new_group(timeout=timedelta(seconds=60)) is one for the wrapper alone."
    }
    arguments = """
        check_finite: ``"raise"`` (or ``True``): before ``optimizer.step()`` (and at the next forward), raise on every
            rank when a rank's own gradient, before the average, held NaN or infinity; names parameters and ranks.
            ``"warn"``: the same as a warning. ``"skip"``: that step changes nothing, on all ranks alike, and clears
            the gradients; goes with a ``GradScaler``. Reads each bucket once more, and the host waits for the answer.
        check_replicas_every: compare the ranks' parameters (:func:`minddp.check_replicas`) before each n-th forward.
    """
    settings: Settings

    def __init__(self, ddp: Any, settings: Settings):
        super().__init__(ddp, settings)
        self._group = ddp.process_group
        self.watch: Any = None
        self.words: Any = None
        self.finite: FiniteCheck | None = None
        self.steps = StepCheck(self)
        self._token: str | None = None
        self._dog: Any = None  # by whom this rank hears of the others
        self._has_warned_of_graph = self._has_warned_of_change = False
        self._unchecked = 0  # iterations since replicas were compared

    def listens(self, event: str) -> bool:
        return self.settings.check_finite is not None or event not in ("bucket_packed", "after_last_launch")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        return Settings(
            _finite_mode(values["check_finite"]),
            _every("check_replicas_every", values["check_replicas_every"]),
        )

    # --- construction ---

    def constructing(self, ddp: Any) -> None:
        watchdog.current(self._group)  # from now on this rank can be asked where it is

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        finite, every = self.settings
        return {"check_finite": finite, "check_replicas_every": every}

    def exchange(self) -> Any:
        return here()

    def exchanged(self, everyone: list[Any]) -> None:
        watchdog.introduce(self._group, [Process(*process) for process in everyone])

    def planning(self, plan: Plan) -> None:
        self._group = plan.group
        self._grads, self._moments = cases.GradStates(weakly(self._on_graph)), _Moments()
        plan.add(self._grads)
        plan.add(self._moments)

    def reducer_made(self, reducer: Any, before: Any) -> None:
        averager, parameters = self.averager, self.averager.parameters
        self.changes = ModuleChanges(averager.module, parameters.named, parameters.reduced)
        # Mixed precision casts parameters itself. One rank alone cannot drift.
        torchs = averager.observers.settings.get("torch_surface")
        casts = torchs is not None and torchs.mixed is not None
        self._may_change = not casts and (self._group.size() > 1 or averager.has_foreign_group)
        streams = parameters.device.type != "cpu"
        before_it = self.watch if before is not None and self.watch.group is self._group else None
        self.watch = Watch(self._group, reducer, self._moments, streams, before_it)
        self.words = Words(self.watch)
        self._dog = self.watch.dog
        if self._dog is not None:
            averager.watch_waits(self.watch.on_stall)
        reducer.set_callbacks(on_interrupted=weakly(self._on_interrupted))
        self.finite = self._finite(reducer)
        if before is None:
            step.watch(self.steps)
        if self._token is not None:
            self.named(self._token)

    def _finite(self, reducer: Any) -> FiniteCheck | None:
        mode = self.settings.check_finite
        if mode is None:
            return None
        parameters, wire = self.averager.parameters, self.averager.observers.get("wire")
        names = {id(p): name for name, p in zip(parameters.names, parameters.reduced)}
        hint = "" if wire is None else wire.range_hint
        made = FiniteCheck(self._group, names, parameters.device, mode, weakly(self._step_skipped), hint)
        made.skipped = 0 if self.finite is None else self.finite.skipped
        return made

    def _step_skipped(self) -> None:
        for call in self.averager.observers.step_skipped:
            call()

    def named(self, token: str) -> None:
        self._token = token
        if self.watch is not None:
            self.watch.progress.key = token

    # --- a forward ---

    def checking(self) -> None:
        if self.watch.lost is not None:  # what follows may wait for the device
            self.watch.check_lost()
        if self.changes.found and self.averager.is_under_way():  # a layer that was replaced has left its bucket open
            self.averager.report_failure(self.refuse_change)
        if self.finite is not None:
            self.finite.check()

    def saving(self) -> None:
        if self.watch is not None:
            self.watch.check_lost()

    def before_forward(self, joining: bool) -> None:
        if self._dog is not None:
            self._dog.note_forward()
        if self.settings.check_replicas_every is not None and not joining:
            self._unchecked += 1
            if self._unchecked >= self.settings.check_replicas_every:
                self._unchecked = 0
                averager = self.averager
                compare(averager.module, averager.parameters, averager.group)

    def after_forward(self, outputs: list[torch.Tensor], synchronized: bool) -> None:
        """What is not in the reducer gets local gradients in the backward that follows."""
        self.changes.synchronized = synchronized
        found = self.changes.look() if synchronized and self._may_change else None
        if found is None:
            return
        # A parameter has a new autograd node, without our hook, if it was cast and cast back, or if something was
        # registered: a parametrization's original.
        self.averager.reducer.renew_hooks()
        if found and not self._has_warned_of_change:
            self._has_warned_of_change = True
            log.warning("%s This is logged once. [rank %d]", refusal(found), self._group.rank())

    def change_text(self) -> str:
        return refusal(self.changes.found)

    def refuse_change(self) -> None:
        raise RuntimeError(self.change_text())

    # --- backward ---

    def bucket_packed(self, bucket: Any) -> None:
        if self.finite is not None:
            self.finite.look(bucket)

    def after_last_launch(self) -> None:
        if self.finite is not None:
            self.finite.send()

    def _on_graph(self) -> None:
        """In the first synchronized backward with ``create_graph=True``."""
        if self._group.size() > 1 and not self._has_warned_of_graph:
            self._has_warned_of_graph = True
            log.warning(_GRAPH, self._group.rank())

    def _on_interrupted(self, why: str) -> None:
        """An exception has ended a backward whose averages the others expect. ``why``: its text, if the reducer's."""
        self.watch.report_interrupted(why)

    # --- now and then ---

    def hooking(self, steps: bool) -> None:
        if steps and self.finite is not None:
            raise RuntimeError("check_finite= looks before optimizer.step(); an optimizer in backward has none")

    def hook_changed(self, name: str) -> None:
        if not self.averager.has_builtin_hook:
            self.watch.hook = name

    def failed(self, error: BaseException | str, where: str) -> None:
        if self.watch is None:
            return
        if where == "backward":
            self.watch.report_failure(error)
        elif where == "collective":
            self.watch.report_collective(error)
        elif where == "forward" and isinstance(error, BaseException):
            self.watch.note_words(error)

    def unfinished(self) -> bool:
        return bool(self._grads.is_interrupted())

    def aborting(self) -> None:
        if self.finite is not None:
            self.finite.forget()

    def collective(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.collective()


class _Moments(cases.Moments):
    """When the last moments of the wrapper's steps were, for whoever asks while they run on other threads."""

    moments = cases.Moments.last


_GRAPH = (
    "DistributedDataParallel: backward(create_graph=True) on rank %d averages the gradients' values. Their graph is "
    "this rank's alone, and so are the second derivatives that autograd makes of it. Average these before they are "
    "used: of h = autograd.grad(gradients, parameters, vectors), the product of this rank's Hessian with vectors "
    "that all ranks share, minddp.functional.all_reduce(each, 'avg') is the mean."
)


def _finite_mode(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return "raise" if value else None
    if value not in FINITE_MODES:
        raise ValueError(f'check_finite must be a bool, "raise", "warn" or "skip", got {value!r}')
    return str(value)


def _every(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a number of iterations, or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {value!r}")
    return int(value)


OBSERVER = Guards
