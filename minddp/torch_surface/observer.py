"""What torch's class does for one wrapper beside the averaging: its less used arguments, and its log."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.utils import _cast_forward_inputs

from .. import events
from .._C import torch_surface as cases
from ..averager import averagers
from ..parameters import all_parameters
from ..reducer import Plan, Stage, weakly
from . import copies, delayed_params, finalization, names  # noqa: F401  give the wrapper torch's names
from .delayed_params import DelayedAllReduce, Named
from .logging_data import LoggingData
from .mixed_precision import MixedPrecision


class Settings(NamedTuple):
    """What the arguments came to. In a copy of the wrapper the parameters are the copy's own: copied with it."""

    mixed: Any  # mixed_precision
    delayed: tuple[Named, ...]
    trigger: torch.nn.Parameter | None


class TorchSurface(events.Observer):
    """Torch's less used arguments, and what its private names show.

    Attributes:
        logger: what ``ddp.logger`` is.
        mixed: with ``mixed_precision``, what swaps parameters between their two precisions.
        delayed: with ``delay_all_reduce_named_params``, their one collective.
        is_copied: the wrapper was unpickled or copied, on this rank alone perhaps.
    """

    name = "torch_surface"
    options = {"delay_all_reduce_named_params": None, "param_to_hook_all_reduce": None, "mixed_precision": None}
    settings: Settings

    def __init__(self, ddp: Any, settings: Any):
        super().__init__(ddp, settings)
        self._ddp: weakref.ref[Any] = weakref.ref(ddp)
        self.logger: LoggingData | None = None
        self.mixed: MixedPrecision | None = None
        self.delayed: DelayedAllReduce | None = None
        self.is_copied = self._has_begun = False

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Any:
        mixed = values["mixed_precision"]
        if mixed is not None and not all(
            hasattr(mixed, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
        ):
            raise TypeError(
                "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision(param_dtype=, "
                f"reduce_dtype=, buffer_dtype=), or None, got {mixed!r}"
            )
        delayed, trigger = values["delay_all_reduce_named_params"], values["param_to_hook_all_reduce"]
        return Settings(mixed, delayed_params.checked(delayed, trigger), trigger)

    # --- construction ---

    def constructing(self, ddp: Any) -> None:
        if self.settings.delayed:
            self._check_delayed(ddp)
            ddp._minddp_apart |= delayed_params.names_of(ddp.module, self.settings.delayed)
        self._localize_shards(ddp)
        config = ddp._minddp_config
        for name in ("reducer", "logger"):  # what a subclass has written before it called the constructor
            ddp.__dict__.pop(name, None)
        ddp.static_graph, ddp.find_unused_parameters = config.static_graph, config.find_unused_parameters
        ddp.gradient_as_bucket_view = config.gradient_as_bucket_view
        ddp.skip_all_reduce_unused_params = config.skip_all_reduce_unused_params
        ddp.batched_grad_copy = config.batched_grad_copy
        ddp.mixed_precision = self.settings.mixed
        ddp.bucket_bytes_cap_default = config.default_caps
        ddp._use_python_reducer = False

    def _localize_shards(self, ddp: Any) -> None:
        """Makes parameters that are DTensors this rank's shards, between forwards: ``tensor_parallel.py``. Those that
        the module asks to ignore belong to others, such as FSDP."""
        if "torch.distributed.tensor" in sys.modules:  # half a second to import, and otherwise there is none
            from .tensor_parallel import localize

            ignored = set(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", None) or ())
            localize(ddp.module, ddp.process_group, {id(p) for _, p in all_parameters(ddp.module, ignored)})

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        return {"mixed_precision": self.settings.mixed}

    def _check_delayed(self, ddp: Any) -> None:
        """Raises ValueError if the delayed parameters' gradients would go past what was asked for."""
        for companion, argument, default in _NOT_DELAYED:
            value = getattr(ddp._minddp_observers.settings.get(companion), argument, default)
            if value != default:
                value = getattr(value, "dtype", value)
                raise ValueError(
                    f"{argument}={value!r} does not go with delay_all_reduce_named_params, whose gradients are "
                    f"averaged in a collective of their own: leave {argument} out, or delay no parameters."
                )

    def planning(self, plan: Plan) -> None:
        mixed = self.settings.mixed
        if mixed is not None and not self.averager.has_builtin_hook:
            plan.reduce_dtype = plan.reduce_dtype or mixed.reduce_dtype or mixed.param_dtype
        self.shared, self._views = cases.SharedParameters(), cases.GradientViews()
        plan.add(cases.TransportMemory(), Stage.MEMORY)
        if mixed is not None:
            plan.add(cases.AnyGradDtype(), Stage.MEMORY)
        if any(plan.sparse):
            plan.add(cases.SparseBuckets(plan.sparse), Stage.KINDS)
        plan.add(cases.ContextGradients(self._not_in_contexts()), Stage.GRADIENTS)
        if plan.config.gradient_as_bucket_view:
            plan.add(self._views, Stage.GRADIENTS)
        if plan.config.lazy_bucket_allocation:
            plan.add(cases.LazyMemory())
        plan.add(self.shared)

    def _not_in_contexts(self) -> str:
        """Why gradients of distributed autograd's contexts cannot be reduced; empty: they can."""
        if getattr(self.averager.observers.settings.get("reductions"), "reduction", "mean") != "mean":
            return 'its reduction is no mean: pass reduction="mean"'
        delays = self.settings.delayed
        return "others would stay local: leave out delay_all_reduce_named_params" if delays else ""

    def reducer_made(self, reducer: Any, before: Any) -> None:
        averager, ddp = self.averager, self._ddp()
        devices = None if ddp is None else (ddp.device_ids, ddp.output_device)
        self.logger = LoggingData(averager, devices or (None, None))
        self._note_sharers(reducer)
        if self.mixed is None:  # it keeps the parameters' two precisions, and asks for the reducer of the moment
            parameters = averager.parameters
            buffers = parameters.buffers(averager.module).values()
            moved = weakly(self._renew_hooks)
            self.mixed = MixedPrecision.make(
                self.settings.mixed, averager.module, parameters.module_parameters, buffers, moved
            )
        reducer.manual_finalization = ddp is not None and ddp.require_manual_backward_finalization
        if before is None:
            self._begin(ddp)

    def _note_sharers(self, reducer: Any) -> None:
        """Other wrappers of some of these parameters: a backward through theirs is not this one's."""
        mine = self.averager
        for other in averagers():
            theirs = other.observers.get("torch_surface")
            if other is not mine and theirs and not mine.parameter_ids().isdisjoint(other.parameter_ids()):
                views = mine.config.gradient_as_bucket_view or other.config.gradient_as_bucket_view
                self.shared.add(other.reducer, views)
                theirs.shared.add(reducer, views)

    def _renew_hooks(self) -> None:
        self.averager.reducer.renew_hooks()

    def _begin(self, ddp: Any) -> None:
        """The wrapper's first reducer is there."""
        config = ddp._minddp_config
        if config.gradient_as_bucket_view and not config.lazy_bucket_allocation:
            self._views.adopt_gradients()
        if self.mixed is not None:
            ddp._minddp_cast = self._cast
        _, delayed, trigger = self.settings
        if delayed:
            assert trigger is not None
            starts = (delayed_params.name_of(ddp.module, trigger) or "param_to_hook_all_reduce", trigger)
            broadcast = None if self.is_copied else ddp.broadcast_bucket_size
            self.delayed = DelayedAllReduce(ddp.process_group, delayed, starts, broadcast)

    def refreshing(self, ddp: Any) -> None:
        if self.mixed or self.delayed or ddp._minddp_averager.reducer.optimizer_in_backward:
            raise NotImplementedError(
                "minddp.refresh does not go with mixed_precision=, delay_all_reduce_named_params= or an optimizer in "
                "backward, which hold on to parameters: construct the wrapper anew."
            )
        self._localize_shards(ddp)

    # --- a forward ---

    def entering(self) -> None:
        ddp = self._ddp()
        if ddp is not None and not self._has_begun:
            self._has_begun = True
            ddp._setup_in_backward_optimizers()
        if self.logger is not None and self.logger.rebuilds:
            self.logger.note_steps(self.averager)

    def _cast(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.mixed is not None
        inputs, kwargs = _cast_forward_inputs(self.mixed.param_dtype, *inputs, **kwargs)
        self.mixed.lower()
        return inputs, kwargs

    def after_forward(self, outputs: list[torch.Tensor], synchronized: bool) -> None:
        if self.logger is not None:
            self.logger.forwards += synchronized
        if self.delayed is not None:
            self.prepare_delayed()
        if self.mixed is not None:
            self.mixed.restore_after_backward(outputs)

    def prepare_delayed(self) -> None:
        """After a forward: the buffer of the gradients whose reduction is delayed is made ready."""
        ddp = self._ddp()
        if self.delayed is not None and ddp is not None:
            self.delayed.prepare(ddp._join_config.enable, self.averager.divisor)

    # --- now and then ---

    def buckets_changed(self, reducer: Any) -> None:
        if self.logger is not None and self.logger.rebuilds and self.averager.has_rebuilt_buckets:
            self.logger.note_rebuilt(self.averager)

    def hook_changed(self, name: str) -> None:
        if self.logger is not None:
            self.logger.set("comm_hook", name)

    def joined(self, now: bool) -> None:
        if self.logger is not None and now:
            self.logger._set_uneven_input_join()

    def shadowed(self, synchronized: bool, by_all: bool) -> None:
        if self.delayed is not None:  # whose collective does not mind no_sync
            self.delayed.shadow(synchronized, by_all)

    def failed(self, error: BaseException | str, where: str) -> None:
        if self.logger is not None and where != "forward":
            self.logger.set_error_and_log(str(error))


# (companion, argument, its default) that do not go with delayed parameters.
_NOT_DELAYED = (
    ("reductions", "reduction", "mean"),
    ("guards", "check_finite", None),
    ("wire", "wire", None),
    ("wire", "ordered", False),
)

OBSERVER = TorchSurface
