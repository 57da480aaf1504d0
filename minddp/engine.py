"""What hangs on one reducer, and the one place where it is made and remade.

What always holds: at most one of the wrapper's reducers has hooks on its parameters, and everything that knows a
reducer (tuner, mixed precision, the checks, the log, the hook, a pinned plan) knows that one. Whoever changes what a
reducer is made from ends in :meth:`Engine.rebuild`. That runs between iterations, on the thread that calls forward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _C, environment
from .buckets import split_by_kind
from .config import Config
from .guards import adopted_backwards, step
from .guards.finite_check import FiniteCheck
from .guards.local_gradients import LocalGradients
from .guards.module_changes import ModuleChanges, refusal
from .guards.stall_inspector import StallInspector
from .guards.step import StepCheck
from .hooks import BUILTIN_HOOK_DTYPES, waits_in_callbacks
from .parameters import Parameters
from .planner import BucketPlan
from .planner.autotune import AutoTuner
from .reducer import Reducer, weakly
from .straggler.watch import StragglerWatch
from .timeline import recording
from .torch_surface.logging_data import LoggingData
from .torch_surface.mixed_precision import MixedPrecision
from .wire.format import WireFormat

Result = TypeVar("Result")


class Engine(StepCheck):
    """The reducer of one wrapper, with all that is made from the same settings.

    Args:
        module: the wrapped module.
        config: the constructor's arguments.
        parameters: what is reduced; not empty.
        group: the process group.
        devices: ``(device_ids, output_device)``, for the log.

    Attributes:
        reducer, logger, inspector, finite, changes, mixed, tuner: made by :meth:`rebuild`.
        wire: what gradients travel as.
        hook: ``(state, hook)`` as registered, or ``(None, builtin type)``; None: the reducer's own all-reduce.
    """

    reducer: Reducer
    logger: LoggingData

    def __init__(
        self,
        module: torch.nn.Module,
        config: Config,
        parameters: Parameters,
        group: dist.ProcessGroup,
        devices: tuple[list[int] | None, int | None] = (None, None),
    ):
        self.module = module
        self.config = config
        self.parameters = parameters
        self.group = group
        self.devices = devices
        super().__init__()
        self.wire = WireFormat(config.wire, config.ordered, group, environment.always_reduce())
        self.hook: tuple[Any, Any] | None = None
        self.mixed: MixedPrecision | None = None
        self.finite: FiniteCheck | None = None
        self._has_warned_of_adopted = False
        self.has_rebuilt_buckets = False
        self.is_joining = False  # the last synchronized forward ran inside of join()
        self._stragglers = None if config.on_straggler is None else StragglerWatch(config.on_straggler)
        self._made = False
        self._token: str | None = None  # what all ranks call this wrapper
        self.rebuild()
        if not config.lazy_bucket_allocation:
            self.reducer.adopt_gradients()

    def __del__(self) -> None:
        """A collective that was given up may keep the reducer's C++ half alive. Its hooks are removed: they must not
        run beside the next wrapper's."""
        if self.__dict__.get("_made") and not sys.is_finalizing():
            self.reducer.detach()

    # --- making ---

    def rebuild(self, config: Config | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Detaches the reducer there is and makes one for what holds now. REQUIRES: no backward is running."""
        before = self.reducer if self._made else None
        if before is not None:
            before.detach()
        self.config = config or self.config
        self.group = self.wire.group = group or self.group
        self.has_rebuilt_buckets = False
        plan = self.config.bucket_plan
        planned = None if plan is None else plan.parameter_buckets(*self.parameters.facts())  # or raises
        self.reducer = Reducer(
            self.parameters.reduced,
            self.parameters.names,
            self.parameters.expect_sparse(),
            self.group,
            self.replaced(reduce_dtype=self._reduce_dtype()),
            self.wire,
            always_reduce=self.has_foreign_group or environment.always_reduce(),
            delays=bool(self.parameters.delayed),
        )
        self._made = True
        if before is not None:
            self.reducer.take_over(before)
            self.reducer.sync_enabled = before.sync_enabled
            self.reducer.optimizer_in_backward = before.optimizer_in_backward
        self.changes = ModuleChanges(self.module, self.parameters.named, self.parameters.reduced)
        self.logger = LoggingData(self.module, self.config, self.parameters, self.reducer, self.devices)
        self._note_sharers()
        self._make_guards()
        if self._token is not None:
            self.name(self._token)
        self._place_hook()
        if self.mixed is None:  # it keeps the parameters' two precisions, and asks for the reducer of the moment
            self.mixed = MixedPrecision.make(
                self.config.mixed_precision,
                self.module,
                self.parameters.module_parameters,
                self.parameters.buffers(self.module).values(),
                weakly(self._renew_hooks),
            )
        if planned is not None:
            kinds = self.reducer.kinds
            self.reducer.set_buckets(split_by_kind(planned, kinds) if self.wire.is_in_force else planned)
        self.tuner = self._make_tuner()

    def _note_sharers(self) -> None:
        """Other wrappers of some of these parameters: a backward through theirs is not this one's."""
        for other in step.watched():
            if other is self or not isinstance(other, Engine):  # what a wrapper delays is no reducer's
                continue
            if self.parameter_ids().isdisjoint(other.parameter_ids()):
                continue
            views = self.config.gradient_as_bucket_view or other.config.gradient_as_bucket_view
            for one, two in ((self, other), (other, self)):
                one.reducer.share(two.reducer, views)

    def detach(self) -> None:
        """The parameters are nobody's any more."""
        self.reducer.detach()

    @property
    def has_foreign_group(self) -> bool:
        """A process group written in Python, which may do anything, and change its size."""
        return type(self.group) is not dist.ProcessGroup

    def _reduce_dtype(self) -> torch.dtype | None:
        if self.hook is not None and self.has_builtin_hook:
            return BUILTIN_HOOK_DTYPES[self.hook[1].name]
        mixed = self.config.mixed_precision
        if mixed is None or self.config.reduce_dtype is not None:
            return self.config.reduce_dtype
        return mixed.reduce_dtype or mixed.param_dtype

    def _make_guards(self) -> None:
        has_store = dist.is_initialized() and not self.has_foreign_group
        self.inspector = None
        if has_store:
            known, streams = self.parameters.names, self.parameters.device.type != "cpu"
            self.inspector = StallInspector(self.group, self.reducer, known, self.config.desync_timeout, streams)
            stalls, interrupted = weakly(self.inspector.on_stall), weakly(self._on_interrupted)
            self.reducer.set_callbacks(on_stall=stalls, on_interrupted=interrupted)
        store = dist.distributed_c10d._get_default_store() if has_store else None
        inspector = self.inspector
        asked = () if inspector is None else (inspector.word_of, inspector.client)
        self._local_gradients = LocalGradients(self.group, store, "" if inspector is None else inspector.key, *asked)
        self.reducer.set_callbacks(on_adopted=weakly(self._on_adopted))
        skipped = 0 if self.finite is None else self.finite.skipped
        self.finite = None
        if self.config.check_finite:
            names = {id(p): name for name, p in zip(self.parameters.names, self.parameters.reduced)}
            mode, forget = self.config.check_finite, self.wire.forget_losses
            hint = "" if self.config.wire is None else self.config.wire.range_hint
            self.finite = FiniteCheck(self.group, names, self.parameters.device, mode, forget, hint)
            self.finite.skipped = skipped
            self.reducer.after_last_launch.append(self.finite.send)

    def _make_tuner(self) -> AutoTuner | None:
        if not self.config.auto_tune:
            return None
        names, shapes, dtypes = self.parameters.facts()
        return AutoTuner(
            self.reducer,
            self.group,
            names,
            self.reducer.wire_nbytes,
            shapes=shapes,
            dtypes=dtypes,
            kinds=self.reducer.kinds,
            device=self.parameters.device,
        )

    def _renew_hooks(self) -> None:
        self.reducer.renew_hooks()

    # --- the communication hook ---

    @property
    def has_builtin_hook(self) -> bool:
        return self.hook is not None and isinstance(self.hook[1], dist.BuiltinCommHookType)

    def set_hook(self, state: object, hook: Any) -> None:
        """Uses ``hook`` from now on. A builtin hook is a dtype on the wire: the reducer is made anew with it."""
        self.hook = (state, hook)
        if self.has_builtin_hook:
            self.rebuild()
        else:
            self._place_hook()

    def _place_hook(self) -> None:
        if self.hook is not None:
            hook = self.hook[1]
            name = str(hook) if self.has_builtin_hook else getattr(hook, "__qualname__", type(hook).__name__)
            self.logger.set("comm_hook", name)
        users = self.hook is not None and not self.has_builtin_hook
        if users or self.finite is not None:
            # C++ knows only this one; what users register stays where Python's garbage collector sees it.
            self.reducer.set_comm_hook(None, weakly(self._reduce))
        if users:
            self.reducer.averages_itself()
            if self.inspector is not None:
                self.inspector.hook = name

    def _reduce(self, _: object, bucket: Any) -> Any:
        if self.finite is not None:
            self.finite.look(bucket)
        if self.hook is None or self.has_builtin_hook:
            return self.reducer._run_allreduce_hook(bucket)
        state, hook = self.hook
        future = self._run_hook(state, hook, bucket)
        if self.parameters.device.type == "cpu" and waits_in_callbacks(state):
            inspector, index = self.inspector, bucket.index()
            watched = None if inspector is None else lambda waited, error: inspector.on_stall(waited, index, error)
            _C.wait_for_future(future, watched)
        return future

    def _run_hook(self, state: object, hook: Callable[..., Any], bucket: Any) -> Any:
        try:
            return hook(state, bucket)
        except Exception as error:
            if self.inspector is not None:
                self.inspector.report_failure(error)
            raise

    # --- iterations ---

    def arrive(self) -> None:
        """First of all in a forward with gradients: what comes before is this rank's own time."""
        self.reducer.arrive(step.spent_ns())
        self.check_finished()

    def begin_iteration(self, joining: bool) -> None:
        """Before each forward whose backward will be synchronized, after :meth:`check_finished`.

        ``joining``: ranks may have run out of data.
        """
        if self.inspector is not None:
            self.inspector.note_forward()
            self.inspector.take_back()
        self.logger.before_forward(self.reducer)
        if recording.active:
            recording.after_step(self)
        self.is_joining = joining
        if self.has_foreign_group:
            self.reducer.set_divisor(self.group.size())
        if self.config.skip_all_reduce_unused_params:  # a joined rank sends all buckets: it knows nobody's flags
            self.reducer.set_skip_all_reduce_unused(not joining)
        if step.interrupted(self.last_averages):
            self._local_gradients.note_interrupted(self.reducer.iteration())
        if not joining:  # a joined rank would not take part in these collectives
            if self.tuner is not None:
                self.tuner.before_forward()
            iteration = self.reducer.iteration()
            if self._stragglers is not None and self._stragglers.is_due(iteration):
                with self.collective():
                    self._stragglers.look(iteration, self.reducer, self.group)

    def note_changes(self) -> None:
        """After each forward whose backward will be synchronized: what is not in the reducer must not get a gradient
        in that."""
        # Mixed precision casts parameters itself. One rank alone cannot drift.
        if self.mixed is not None or not (self.group.size() > 1 or self.has_foreign_group):
            return
        changes = self.changes.look()
        if changes is None:
            return
        # A parameter has a new autograd node, without our hook, where it was cast and cast back, or where something
        # was registered: a parametrization's original.
        self.reducer.renew_hooks()
        self.reducer.note_changed([change.parameter for change in changes], refusal(changes))

    def rebuild_buckets(self) -> None:
        """Along the order of arrival, once. Collective."""
        if self.reducer._rebuild_buckets(self.collective):
            self.name(self.reducer.agreed_token)
            self.has_rebuilt_buckets = True
            self.logger.note_rebuilt(self.reducer)

    def collective(self) -> AbstractContextManager[None]:
        """Inside, the other ranks know whose collective this one waits in."""
        return nullcontext() if self.inspector is None else self.inspector.collective()

    def name(self, token: str) -> None:
        """What all ranks call this wrapper. Counting is no name: a copy on one rank alone would shift the rest."""
        self._token = token
        if self.inspector is not None:
            self._local_gradients.name(self.inspector.rename(token))

    def abort_iteration(self) -> None:
        """Gives up the iteration that is under way: back to the state between two."""
        if self.inspector is not None and self.reducer.phase() != _C.Phase.IDLE:
            self.inspector.note_given_up()
        self.reducer.abort_iteration()
        if self.reducer.weights is not None:
            self.reducer.weights.forget()
        if self.finite is not None:
            self.finite.forget()
        if self.inspector is not None:
            self.inspector.take_back()

    def note_words(self, error: BaseException) -> None:
        """An exception in the module's forward, which the program may handle."""
        if self.inspector is not None:
            self.inspector.note_words(error)

    def _on_interrupted(self, why: str) -> None:
        """An exception has ended a backward whose averages the others expect. ``why``: its text, if the reducer's."""
        if self.inspector is not None:
            self.inspector.report_interrupted(why)

    def note_joined(self) -> None:
        """This rank has run out of data, in ``join()``: nobody need wait for a word of its optimizer's."""
        self._local_gradients.note_joined(True)

    def note_back(self) -> None:
        """All ranks have run out of data: ``join()`` ends."""
        self._local_gradients.note_joined(False)

    def _on_adopted(self, parameters: list[int]) -> None:
        """A backward counts as a waiting forward's, and its graph has no node of the wrapper's."""
        if not self._has_warned_of_adopted:
            self._has_warned_of_adopted = adopted_backwards.warn(self.module, self.reducer, parameters)

    # --- refusing ---

    def _is_unfinished(self) -> bool:
        reducer = self.reducer
        return reducer.phase() != _C.Phase.IDLE or reducer.interrupted() or reducer.in_backward()

    def parameter_ids(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters.reduced}

    def yield_ownership(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Another wrapper has been made around some of ``parameters``. Gives up an iteration that was left unfinished
        here; not one that waits for finalize_backward(), nor a forward that waits for its backward."""
        waits = self.reducer.phase() == _C.Phase.LAUNCHED and self.reducer.ready_to_finalize()
        if waits or not self._is_unfinished():
            return
        if not self.parameter_ids().isdisjoint(map(id, parameters)):
            self.abort_iteration()

    def check_finished(self) -> None:
        """Raises where the last synchronized backward left something undone, or cannot have ended."""
        if self.inspector is not None:
            self.inspector.check_lost()  # what follows may wait for the device
        self.report_failure(self.reducer.check_finished)
        if self.finite is not None:
            self.finite.check()

    def report_failure(self, check: Callable[[], Result]) -> Result:
        """``check()``; what it raises is reported to the ranks that will wait for this one."""
        try:
            return check()
        except RuntimeError as error:
            self.logger.set_error_and_log(str(error))
            if self.inspector is not None:
                self.inspector.report_failure(error)
            raise

    # --- what others read ---

    @property
    def parameter_names(self) -> list[str]:
        return self.parameters.names

    def names_of_parameters(self) -> dict[torch.Tensor, str]:
        """Of those that are reduced."""
        return dict(zip(self.parameters.reduced, self.parameters.names))

    @property
    def bucket_plan(self) -> BucketPlan:
        """The buckets in force."""
        if self.tuner is not None and self.tuner.plan is not None:
            return self.tuner.plan
        buckets = self.reducer.buckets()
        order = [index for bucket in buckets for index in bucket]
        positions = iter(range(len(order)))
        plan = BucketPlan([[next(positions) for _ in bucket] for bucket in buckets])
        names, shapes, dtypes = self.parameters.facts()
        return plan.for_parameters(names, shapes, dtypes, order)

    def replaced(self, **changes: Any) -> Config:
        """The config with some fields changed."""
        return dataclasses.replace(self.config, **changes)
