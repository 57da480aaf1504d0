"""The module: :class:`DistributedDataParallel`, a drop-in for torch's.

What always holds: the constructor either returns a module that is ready on every rank, or raises on every
rank. It subclasses torch's class so that ``isinstance`` checks and torch's distributed checkpoint take it
for one, but runs none of its code: every method is defined here or in torch_base.py (a test makes torch's raise).
"""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._utils import _get_device_index
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import (
    DistributedDataParallel as _TorchDDP,
)
from torch.nn.parallel.distributed import (
    _BufferCommHook,
    _BufferCommHookLocation,
    _MixedPrecision,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C, ordering, tracing
from .delayed_params import DelayedAllReduce
from .finite_check import FiniteCheck
from .init_sync import broadcast_coalesced, sync_module_states, verify_same_arguments, verify_same_model
from .join import DDPJoinHook, agree_on_sync
from .lifetime import live
from .logging_data import LoggingData
from .mixed_precision import MixedPrecision
from .module_changes import ModuleChanges
from .reducer import MIB, Reducer, ReducerSettings, wire_dtype
from .replicas import check_replicas
from .rpc_context import refuse_rpc_context
from .stall_inspector import StallInspector
from .torch_base import TorchBase

__all__ = ["DistributedDataParallel"]

_DEFAULT_BUCKET_CAP_MB = 25
_DEFAULT_LAST_BUCKET_BYTES = MIB
_DEFAULT_ALONE_BYTES = {"cpu": 4 * MIB}  # elsewhere the cap: collectives cost more there, copies less
_BROADCAST_BUCKET_BYTES = 250 * MIB
_BUILTIN_HOOK_DTYPES = {"FP16_COMPRESS": torch.float16, "ALLREDUCE": None}
_NO_RANGE = nullcontext()
# Made anew where the module is unpickled or copied, and given up when the interpreter ends.
_TIED_TO_GROUP = (
    "process_group", "reducer", "logger", "_tuner", "_mixed", "_delayed", "_stall_inspector", "_changes",
    "_finite",
)  # fmt: skip


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _find_tensors(getattr(value, field.name))


def _run_module(module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
    """A frame of its own, where torch.compile can begin: it begins in no frame of torch's own modules."""
    return module(*inputs, **kwargs)


def _refuse_unfinished(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer.step(): gradients that are not averaged, or not finite, must not be used."""
    for ddp in live:
        unfinished = ddp.reducer and ddp.reducer.phase() == _C.Phase.INCOMPLETE
        if (unfinished or ddp.check_finite) and ddp._shares_parameters(optimizer):
            ddp._check_finished()


def _cap_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of MiB, got {value!r}")
    if not value > 0 or value == float("inf"):
        raise ValueError(f"{name} must be a positive, finite number of MiB, got {value!r}")
    return max(int(value * MIB), 1)


class DistributedDataParallel(TorchBase):
    """Data-parallel training: averages gradients over ranks during ``backward()``.

    Takes torch's arguments in torch's order; replaces ``torch.nn.parallel.DistributedDataParallel``
    without another edit. Every rank constructs it around the same module; rank 0's parameters and
    buffers are copied to the others, every backward ends with the same gradients on all ranks.

    Args:
        module: the module to parallelize, on its device already.
        device_ids: one CUDA device for a module on that device; ``None`` for CPU and multi-device modules.
        output_device: kept for compatibility; with ``device_ids`` only.
        dim: kept for compatibility (scatter and gather).
        broadcast_buffers: deprecated by torch; use ``forward_sync_buffers``.
        init_sync: verify and broadcast parameters and buffers at construction.
        process_group: group to reduce over; default: the default group. Not with ``device_mesh``.
        bucket_cap_mb: a bucket closes once it holds this many MiB. ``None``: 25, and 1 for the last bucket,
            whose reduction nothing can hide; a gradient of 25 MiB (on the CPU: 4) has a bucket of its own,
            where it is reduced in place, without a copy. ``"auto"`` measures and re-plans.
        find_unused_parameters: allow parameters that take no part in a backward. Costs no graph walk:
            what is missing at the end of backward was not used.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: ``.grad`` becomes a window on the bucket: no second copy of gradients.
        static_graph: the same parameters are used, equally often, in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs reduced together, once, when the gradient
            of ``param_to_hook_all_reduce`` is there.
        param_to_hook_all_reduce: see above; both or neither.
        mixed_precision: torch's ``_MixedPrecision``: dtypes of parameters, reduction and buffers.
        device_mesh: a 1-D mesh in place of ``process_group``.
        skip_all_reduce_unused_params: buckets without a used parameter are not reduced; the unused
            parameters must be the same on all ranks.
        bucket_cap_mb_list: one cap a bucket, in launch order; the last one repeats.
        batched_grad_copy: accepted; packing is always one pass per bucket here.
        forward_sync_buffers: broadcast rank 0's buffers before each forward (default ``True``).
        reduction: ``"mean"`` over ranks, ``"sum"``, or ``"weighted"``: the sum of gradients over the sum
            of what every rank passed to :meth:`add_weight`, exactly the large batch's gradient for
            losses summed over samples, however uneven the shares.
        reduce_dtype: dtype in which low-precision gradients travel and are added (``torch.float32``).
        predivide_factor: divide by this before the sum, by the rest after it (range of float16).
        bucket_plan: a :class:`minddp.planner.BucketPlan` to pin.
        check_finite: before ``optimizer.step()`` (and at the next forward), raise on every rank when a rank's own
            gradient, before the average, held NaN or infinity; names parameters and ranks. Reads each bucket
            once more, and the host waits for the answer; not for a ``GradScaler``, which expects infinities.

    Raises:
        RuntimeError: no process group, no parameter requires a gradient, uninitialized parameters, models
            that differ between ranks (on every rank, naming parameter, shapes and ranks).
        ValueError, TypeError: arguments that contradict each other, make no sense or differ between ranks (on
            every rank), each named.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduction: str = "mean",
        reduce_dtype: torch.dtype | None = None,
        predivide_factor: float | None = None,
        bucket_plan: Any = None,
        check_finite: bool = False,
    ):
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        self._set_process_group(process_group, device_mesh, module)
        self._set_ignored(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._set_devices(device_ids, output_device)
        self._set_buffer_policy(broadcast_buffers, forward_sync_buffers, init_sync)
        self._set_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._set_reduction(reduction, reduce_dtype, predivide_factor, gradient_as_bucket_view)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and has no effect.", FutureWarning, stacklevel=2)
        self.dim = dim
        self.module = module
        self.static_graph = bool(static_graph)
        self.find_unused_parameters = bool(find_unused_parameters)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.skip_all_reduce_unused_params = bool(skip_all_reduce_unused_params)
        self.batched_grad_copy = bool(batched_grad_copy)
        self.check_finite = bool(check_finite)
        self.mixed_precision = mixed_precision
        self.broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._checks_order = ordering.enabled()
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        self._synchronize_start(init_sync, bucket_plan)
        self._delayed = DelayedAllReduce.make(self, self._delay_all_reduce_params, param_to_hook_all_reduce)
        self._make_reducer()
        self._mixed = MixedPrecision.make(self, mixed_precision)
        if bucket_plan is not None:
            self._pin_plan(bucket_plan)
        self._tuner = self._make_tuner()
        live.add(self)

    # ----------------------------------------------------------------------------------------
    # Construction: arguments
    # ----------------------------------------------------------------------------------------

    def _set_process_group(self, group: Any, mesh: Any, module: torch.nn.Module) -> None:
        if group is not None and mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if not dist.is_available() or (group is None and mesh is None and not dist.is_initialized()):
            raise RuntimeError(
                "DistributedDataParallel needs a process group: call torch.distributed.init_process_group() "
                "on every rank first (torchrun sets what it reads), or pass process_group=."
            )
        if mesh is not None:
            if mesh.ndim != 1:
                raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
            self.device_mesh = mesh
            group = mesh.get_group(mesh_dim=0)
            if mesh._get_root_mesh() != mesh:  # one dimension of several: the others may shard the module
                from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

                _pre_dp_module_transform(module)
        self.process_group: Any = group if group is not None else dist.group.WORLD
        if not isinstance(self.process_group, dist.ProcessGroup):
            raise RuntimeError("process_group: this rank is not a member of the group, so it cannot train in it.")

    def _set_ignored(self, module: torch.nn.Module, delayed: Any, trigger: Any) -> None:
        if (delayed is None) != (trigger is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
        self.parameters_to_ignore: set[str] = set(ignored or ())
        known = {name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())}
        known |= {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if unknown := sorted(self.parameters_to_ignore - known):
            raise ValueError(
                f"_ddp_params_and_buffers_to_ignore names {unknown}, but the module has no such parameter or "
                "buffer; use the names of named_parameters() and named_buffers()."
            )
        self._delay_all_reduce_params: list[torch.nn.Parameter] = []
        for name, parameter in delayed or ():
            if name not in known:
                raise ValueError(f"delay_all_reduce_named_params: the module has no parameter {name!r}")
            self.parameters_to_ignore.add(name)
            self._delay_all_reduce_params.append(parameter)
        for name, parameter in self._collect_parameters(module):
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: "
                    f"'{name}' has no shape yet. Run a dummy forward pass to initialize the lazy modules first."
                )
        self._delay_all_reduce_all_params = not self.parameter_names and bool(self._delay_all_reduce_params)
        self._check_trainable()

    def _collect_parameters(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        named = [(name, p) for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        self._module_parameters = [parameter for _, parameter in named]
        self.parameter_names = [name for name, p in named if p.requires_grad]
        self.reducer_parameters = [p for _, p in named if p.requires_grad]
        return named

    def _check_trainable(self) -> None:
        if not self.parameter_names and not self._delay_all_reduce_params:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient: use the module as it is, or set requires_grad before wrapping."
            )

    def _set_devices(self, device_ids: Any, output_device: Any) -> None:
        parameters = self._module_parameters or self._delay_all_reduce_params
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids can only be None or contain a single element, got {device_ids}.")
        types = sorted({p.device.type for p in parameters})
        if len(types) > 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but its "
                f"parameters are on {types}: move the whole module to one type before wrapping."
            )
        self.device_type = types[0]
        self.device = parameters[0].device
        self.is_multi_device_module = len({p.device for p in parameters}) > 1
        single = self.device_type != "cpu" and not self.is_multi_device_module
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if device_ids and single:
            self.device_ids = [_get_device_index(x, True) for x in device_ids]
            self.output_device = _get_device_index(device_ids[0] if output_device is None else output_device, True)
        elif device_ids or output_device is not None:
            raise ValueError(
                f"device_ids {device_ids} and output_device {output_device} only work with a module on one GPU, "
                f"but its parameters are on {sorted({str(p.device) for p in parameters})}: leave both out."
            )

    def _set_buffer_policy(self, broadcast: bool | None, forward: bool | None, init_sync: bool) -> None:
        if broadcast is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated: pass `forward_sync_buffers`"
                + (
                    ", whose value is used."
                    if forward is not None
                    else ". Only broadcast_buffers=False also leaves buffers out of the synchronization at "
                    "construction."
                ),
                FutureWarning,
                stacklevel=3,
            )
        self.forward_sync_buffers: bool = next((bool(v) for v in (forward, broadcast) if v is not None), True)
        self._init_sync_buffers = forward is not None or broadcast is not False

    def _set_caps(self, cap_mb: Any, cap_mb_list: Any) -> None:
        self._auto_tune = cap_mb == "auto"
        if isinstance(cap_mb, str) and not self._auto_tune:
            raise ValueError(f'bucket_cap_mb must be a number of MiB, None or "auto", got {cap_mb!r}')
        default = cap_mb is None or self._auto_tune
        self.bucket_bytes_cap = _cap_bytes("bucket_cap_mb", _DEFAULT_BUCKET_CAP_MB if default else cap_mb)
        self.bucket_bytes_cap_list = [_cap_bytes("bucket_cap_mb_list", cap) for cap in cap_mb_list or []]
        if self.bucket_bytes_cap_list:
            self.bucket_bytes_cap = max(self.bucket_bytes_cap_list)
        self.bucket_bytes_cap_default = default and not self.bucket_bytes_cap_list

    def _caps(self) -> list[int]:
        return self.bucket_bytes_cap_list or [self.bucket_bytes_cap]

    def _set_reduction(self, reduction: str, dtype: Any, predivide: Any, as_view: bool) -> None:
        if reduction not in ("mean", "sum", "weighted"):
            raise ValueError(f'reduction must be "mean", "sum" or "weighted", got {reduction!r}')
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"reduce_dtype must be a floating point torch.dtype, got {dtype!r}")
        if dtype is not None and as_view and any(p.dtype != dtype for p in self.reducer_parameters):
            raise ValueError(
                "reduce_dtype and gradient_as_bucket_view=True contradict each other: a gradient cannot be a "
                "window on a bucket of another dtype. Leave one of them out."
            )
        if predivide is not None and not (isinstance(predivide, (int, float)) and predivide > 0):
            raise ValueError(f"predivide_factor must be a positive number, got {predivide!r}")
        self.reduction = reduction
        self.reduce_dtype = dtype
        self.predivide_factor = predivide

    # ----------------------------------------------------------------------------------------
    # Construction: start of all ranks, reducer
    # ----------------------------------------------------------------------------------------

    def _synchronize_start(self, init_sync: bool, bucket_plan: Any) -> None:
        self._assign_modules_buffers()
        if not init_sync:
            return
        group = self.process_group
        arguments = {
            "bucket_cap_mb": "auto" if self._auto_tune else [cap / MIB for cap in self._caps()],
            "bucket_plan": None if bucket_plan is None else bucket_plan.buckets,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
            "reduction": self.reduction,
            "reduce_dtype": self.reduce_dtype,
            "predivide_factor": self.predivide_factor,
            "mixed_precision": self.mixed_precision,
            "check_finite": self.check_finite,
        }
        verify_same_arguments(arguments, group)
        self._synchronize_model()

    def _synchronize_model(self) -> None:
        group = self.process_group
        verify_same_model("parameter", list(zip(self.parameter_names, self.reducer_parameters)), group)
        if self._init_sync_buffers:
            verify_same_model("buffer", list(self.named_module_buffers.items()), group)
        sync_module_states(
            self.module, group, self.broadcast_bucket_size, 0, self.parameters_to_ignore, self._init_sync_buffers
        )

    def _make_reducer(self) -> None:
        if self._delay_all_reduce_all_params:
            self.reducer = None
            self.logger: Any = None
            return
        settings = ReducerSettings(
            graph_mode=self._graph_mode(),
            caps=self._caps(),
            last_cap=_DEFAULT_LAST_BUCKET_BYTES if self.bucket_bytes_cap_default else None,
            alone_from=_DEFAULT_ALONE_BYTES.get(self.device_type, self.bucket_bytes_cap)
            if self.bucket_bytes_cap_default
            else None,
            reduction=self.reduction,
            reduce_dtype=self._buffer_dtype(),
            predivide_factor=self.predivide_factor,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused=self.skip_all_reduce_unused_params,
            has_average=self.device_type == "cuda"
            and dist.get_backend(self.process_group) == "nccl"
            and not self.check_finite,
        )
        parameters, expect_sparse = self._build_params_for_reducer()
        self._changes = ModuleChanges(self.module, self.parameters_to_ignore, parameters)
        self.reducer = Reducer(parameters, self.parameter_names, expect_sparse, self.process_group, settings)
        self._finite = None
        if self.check_finite:
            names = {id(p): name for name, p in zip(self.parameter_names, parameters)}
            self._finite = FiniteCheck(self.process_group, names)
            self.reducer.look_before_reduction(self._finite)
        self.logger = LoggingData(self)
        self._stall_inspector = StallInspector(self.process_group) if dist.is_initialized() else None
        if self._stall_inspector is not None:
            self.reducer.set_stall_handler(self._stall_inspector.on_stall)

    def _remake_reducer(self) -> None:
        """The same reducer for changed settings: hooks, and whether to synchronize, move along."""
        sync, facts = self.reducer.sync_enabled, self.logger
        self._make_reducer()
        self.reducer.sync_enabled = sync
        if facts.comm_hook is not None:
            self.logger.set("comm_hook", facts.comm_hook)
        self._restore_comm_hook()

    def _restore_comm_hook(self) -> None:
        if self._comm_hook is not None and not isinstance(self._comm_hook[1], dist.BuiltinCommHookType):
            state, hook = self._comm_hook
            hook = hook if self._finite is None else self._finite.before(hook)
            inspector = self._stall_inspector
            self.reducer.set_comm_hook(state, hook if inspector is None else inspector.guard(hook))

    def _graph_mode(self) -> Any:
        if self.static_graph:
            return _C.GraphMode.STATIC
        return _C.GraphMode.FIND_UNUSED if self.find_unused_parameters else _C.GraphMode.ALL_USED

    def _buffer_dtype(self) -> torch.dtype | None:
        if self._comm_hook is not None and isinstance(self._comm_hook[1], dist.BuiltinCommHookType):
            return _BUILTIN_HOOK_DTYPES[self._comm_hook[1].name]
        if self.mixed_precision is None or self.reduce_dtype is not None:
            return self.reduce_dtype
        return self.mixed_precision.reduce_dtype or self.mixed_precision.param_dtype

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """The parameters to reduce, and for each whether its gradient is sparse."""
        sparse = {
            id(parameter)
            for module in self.module.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
            for parameter in module.parameters(recurse=False)
        }
        return self.reducer_parameters, [id(p) in sparse for p in self.reducer_parameters]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, str]:
        """Index in ``parameters`` -> name; ValueError when the two do not match."""
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        for name, parameter in zip(self.parameter_names, self.reducer_parameters):
            if id(parameter) not in index:
                raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
        if len(index) != len(self.parameter_names):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got "
                f"{len(index)} parameters and {len(self.parameter_names)} names."
            )
        return {index[id(p)]: name for name, p in zip(self.parameter_names, self.reducer_parameters)}

    def _parameter_facts(self) -> tuple[list[str], list[torch.Size], list[torch.dtype]]:
        parameters = self.reducer_parameters
        return self.parameter_names, [p.shape for p in parameters], [p.dtype for p in parameters]

    def _pin_plan(self, plan: Any) -> None:
        if self._auto_tune:
            raise ValueError('bucket_plan= pins the buckets, bucket_cap_mb="auto" searches them: pass one')
        self.reducer.set_buckets(plan.parameter_buckets(*self._parameter_facts()))

    def _make_tuner(self) -> Any:
        if not self._auto_tune or self.reducer is None:
            return None
        from .autotune import AutoTuner

        names, shapes, dtypes = self._parameter_facts()
        nbytes = [p.numel() * wire_dtype(p, self.reducer.settings).itemsize for p in self.reducer_parameters]
        return AutoTuner(
            self.reducer,
            self.process_group,
            names,
            nbytes,
            shapes=shapes,
            dtypes=dtypes,
            kinds=self.reducer.kinds,
            device=self.device,
        )

    @property
    def bucket_plan(self) -> Any:
        """The buckets in force as a :class:`minddp.planner.BucketPlan`: save it, pin it with ``bucket_plan=``."""
        from .planner import BucketPlan

        if self._tuner is not None and self._tuner.plan is not None:
            return self._tuner.plan
        buckets = self.reducer.buckets()
        order = [index for bucket in buckets for index in bucket]
        positions = iter(range(len(order)))
        plan = BucketPlan([[next(positions) for _ in bucket] for bucket in buckets])
        return plan.for_parameters(*self._parameter_facts(), order)

    # ----------------------------------------------------------------------------------------
    # Forward
    # ----------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; gradients of what it returns are averaged in backward."""
        # A range costs ten microseconds, whether or not anybody looks.
        with record_function("DistributedDataParallel.forward") if profiler._is_profiler_enabled else _NO_RANGE:
            if get_eval_frame_callback() is not None:  # torch.compile is at work
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
                return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
            inputs, kwargs = _unwrapped_pre_forward(self, *inputs, **kwargs)
            return _unwrapped_post_forward(self, _unwrapped_run(self, *inputs, **kwargs))

    @torch._disable_dynamo(recursive=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._delay_all_reduce_all_params:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._lazy_init()
        grad = torch.is_grad_enabled()
        if grad and self.reducer.sync_enabled:
            self._begin_iteration()
        self._note_not_joined()
        if grad and not self.reducer.has_rebuilt:
            self._rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            agree_on_sync(self, is_joined_rank=False)
        return self._move_inputs(inputs, kwargs)

    @torch._disable_dynamo(recursive=True)
    def _post_forward(self, output: Any) -> Any:
        if self._delayed is not None:
            self._delayed.prepare()
        if self._delay_all_reduce_all_params:
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        grad = torch.is_grad_enabled()
        self.__dict__["require_forward_param_sync"] = grad and self.reducer.sync_enabled
        if grad:
            self.reducer.prepare_for_backward(list(_find_tensors(output)))
        if self._mixed is not None:
            self._mixed.restore_after_backward(_find_tensors(output))
        return output

    # torch.compile looks for the active module to split graphs where buckets end. Dynamo leaves this frame alone
    # and begins in the next.
    @torch._disable_dynamo(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outer = _TorchDDP._active_ddp_module
        _TorchDDP._active_ddp_module = self
        try:
            return _run_module(self.module, inputs, kwargs)
        finally:
            _TorchDDP._active_ddp_module = outer

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _TorchDDP._active_ddp_module

    def _begin_iteration(self) -> None:
        """What is done once before each forward whose backward will be synchronized."""
        refuse_rpc_context()
        self._check_finished()
        if self._mixed is None:  # which casts parameters itself
            self._report_failure(self._changes.check)
        self.logger.before_forward(self)
        if tracing.active:
            tracing.after_step(self)
        if not self._join_config.enable:  # a joined rank would not take part in these collectives
            if self._tuner is not None:
                self._tuner.before_forward()
            if self._checks_order:
                ordering.check(self.process_group)
                ordering.record(self.process_group, f"DDP backward of {len(self.reducer.buckets())} buckets")
        self.reducer.note_forward_begin()

    def _lazy_init(self) -> None:
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _check_finished(self) -> None:
        self._report_failure(self.reducer.check_finished)
        if self._finite is not None:
            self._finite.check()

    def _report_failure(self, check: Callable[[], None]) -> None:
        """Runs ``check``; what it raises is told to the ranks that will wait for this one."""
        try:
            check()
        except RuntimeError as error:
            self.logger.set_error_and_log(str(error))
            if self._stall_inspector is not None:
                self._stall_inspector.report_failure(error)
            raise

    def _shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(parameter) for parameter in self.reducer_parameters}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _rebuild_buckets(self) -> None:
        before = {frozenset(bucket) for bucket in self.reducer.buckets()}
        if not self.reducer._rebuild_buckets():
            return
        changed = before != {frozenset(bucket) for bucket in self.reducer.buckets()}
        if changed or not self.find_unused_parameters:
            self._has_rebuilt_buckets = True
            self.logger.note_rebuilt(self)

    def _note_not_joined(self) -> None:
        work = Join.notify_join_context(self)
        if work is None:
            return
        active = work.get_future().wait()[0]
        initial = self._divide_by_initial_world_size
        self.reducer.set_divisor(self.process_group.size() if initial else int(active.item()))

    def _move_inputs(self, inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._mixed is not None:
            inputs, kwargs = _cast_forward_inputs(self._mixed.param_dtype, *inputs, **kwargs)
            self._mixed.lower()
        return inputs, kwargs

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on device ``device_id``: tensors in nested containers, dataclasses, PackedSequence."""
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return torch.nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.nn.parallel.scatter_gather.gather(outputs, output_device, dim=self.dim)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        torch.nn.Module.train(self, mode)
        return self

    # ----------------------------------------------------------------------------------------
    # Synchronization: when, and of what
    # ----------------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now is synchronized; ``no_sync`` sets it, libraries too."""
        if self.__dict__.get("reducer") is None:
            return self.__dict__.get("_sync_without_reducer", True)
        return self.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self.__dict__.get("reducer") is None:
            self.__dict__["_sync_without_reducer"] = bool(value)
        else:
            self.reducer.sync_enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside accumulate locally; the next one outside averages all of it.

        What counts is where ``backward()`` runs; including forward also saves its buffer broadcast.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def add_weight(self, weight: float) -> None:
        """Adds this micro-batch's weight (samples, tokens) to the divisor of ``reduction="weighted"``.

        Call it before the micro-batch's backward, under ``no_sync`` too; weights add up until the next
        synchronized backward, which divides by their sum over all ranks.

        Raises:
            RuntimeError: ``reduction`` is not ``"weighted"``.
            ValueError: ``weight`` is negative or not finite.
        """
        if self.reduction != "weighted":
            raise RuntimeError(f'add_weight needs reduction="weighted", this module has {self.reduction!r}')
        weight = float(weight)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight must be finite and not negative, got {weight}")
        self.reducer.add_weight(weight)

    def release_buckets(self) -> None:
        """Frees the buckets' memory between phases of training; the next backward allocates it again."""
        self.reducer.release_buckets()

    def check_replicas(self, buffers: bool = False) -> None:
        """Raises on every rank unless all ranks hold the same parameters, bit for bit. Collective.

        Reads the model once, on the host: for now and then, or after each step while looking for a cause.

        Args:
            buffers: compare buffers too. Between the broadcasts before forward they usually differ.

        Raises:
            RuntimeError: names the tensors that differ, and which ranks hold the same.
        """
        tensors = itertools.chain(self.module.named_parameters(), self.module.named_buffers() if buffers else ())
        named = [(name, tensor) for name, tensor in tensors if name not in self.parameters_to_ignore]
        check_replicas(named, self.process_group)

    def refresh(self) -> None:
        """Takes over what has changed in the module since it was wrapped. Collective, between iterations.

        Parameters may have been added, replaced, removed, frozen, unfrozen, cast or moved, on all ranks alike. All
        ranks' parameters and buffers become rank 0's. Buckets are cut anew, as after construction: a pinned plan no
        longer holds, ``"auto"`` measures again. A communication hook stays; one that keeps state for each bucket has
        to forget it. New parameters have to be given to the optimizer.

        Raises:
            RuntimeError: the last backward was not finished, the ranks' modules differ (on every rank), or nothing
                requires a gradient any more.
            NotImplementedError: with ``mixed_precision``, delayed parameters or an optimizer in backward.
        """
        if self._mixed is not None or self._delayed is not None or self.reducer.optimizer_in_backward:
            raise NotImplementedError(
                "refresh() does not go with mixed_precision=, delay_all_reduce_named_params= or an optimizer in "
                "backward, which hold on to parameters: construct the wrapper anew."
            )
        self._check_finished()
        self._collect_parameters(self.module)
        self._check_trainable()
        self._set_devices(self.device_ids, self.output_device)
        self._assign_modules_buffers()
        self._synchronize_model()
        self.reducer.remove_hooks()  # with them go autograd's nodes, which know the old dtypes
        self._remake_reducer()
        self._has_rebuilt_buckets = False
        self._tuner = self._make_tuner()

    def last_step(self) -> tracing.StepTimes:
        """Where the last synchronized backward's time went, in seconds, bucket by bucket.

        Cheap enough to call in every step; the raw stamps are ``ddp.reducer.last_step()``.
        """
        return tracing.step_times(self.reducer.last_step())

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _assign_modules_buffers(self) -> None:
        # Anew each time: modules may put other tensors in their buffers' places.
        self.named_module_buffers = {
            name: buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        location = _BufferCommHookLocation.PRE_FORWARD
        return self.will_sync_module_buffers() and self._buffer_hook_location(location) == location

    def _check_sync_bufs_post_fwd(self) -> bool:
        location = _BufferCommHookLocation.POST_FORWARD
        return (
            self.will_sync_module_buffers()
            and self._buffer_hook_location(_BufferCommHookLocation.PRE_FORWARD) == location
        )

    def _buffer_hook_location(self, default: Any) -> Any:
        hook = self.__dict__.get("buffer_hook")
        return default if hook is None else hook.buffer_comm_hook_location

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            source = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
            self._assign_modules_buffers()
            # A graph that used a buffer before must not take the copy for an in-place change of its input.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        for future in futures or ():
            self.reducer.wait_after_backward(future)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        with torch.no_grad():
            broadcast_coalesced(self.process_group, list(tensors), buffer_size, authoritative_rank)

    # ----------------------------------------------------------------------------------------
    # Hooks
    # ----------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket) -> torch.futures.Future[torch.Tensor]`` reduces buckets from now on.

        Hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` run unchanged. A hook divides by the
        world size itself; its future holds one tensor with as many elements as ``bucket.buffer()``.

        Raises:
            TypeError, ValueError: the hook is not callable, or its signature is another one.
            RuntimeError: a hook is registered already, or training has begun.
        """
        self._check_comm_hook(hook)
        self._check_hook_time()
        self._comm_hook = (state, hook)
        self._restore_comm_hook()
        self.logger.set("comm_hook", getattr(hook, "__qualname__", type(hook).__name__))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's built-in C++ hooks: here, the dtype in which gradients travel."""
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in _BUILTIN_HOOK_DTYPES:
            raise ValueError(f"comm_hook_type must be one of dist.BuiltinCommHookType, got {comm_hook_type!r}")
        self._check_hook_time()
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hook = (None, comm_hook_type)
        self._remake_reducer()
        self.logger.set("comm_hook", str(comm_hook_type))

    def _check_hook_time(self) -> None:
        if self.reducer is None:
            raise RuntimeError("every parameter's reduction is delayed: there are no buckets to hook")
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.reducer.iteration() > 0:
            raise RuntimeError(
                "register_comm_hook must be called before the first backward: gradients have been reduced "
                "without the hook already."
            )
        if self._tuner is not None:
            raise RuntimeError(
                'bucket_cap_mb="auto" re-plans buckets while training, and hooks may keep state by bucket: '
                "tune without the hook, then pin the plan (bucket_plan=)"
            )
        if self.reduce_dtype is not None or self.predivide_factor is not None:
            raise RuntimeError("a communication hook decides dtype and division itself: leave out reduce_dtype "
                               "and predivide_factor")  # fmt: skip

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, f"Communication hook must be callable, got {hook!r}.")
        parameters = inspect.signature(hook).parameters
        if "bucket" not in parameters:
            self._log_and_throw(
                ValueError, f"Communication hook must be hook(state, bucket), got parameters {list(parameters)}."
            )
        if parameters["bucket"].annotation not in (inspect._empty, dist.GradBucket, _C.GradBucket, "dist.GradBucket"):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        result = inspect.signature(hook).return_annotation
        future = torch.futures.Future[torch.Tensor]
        if result not in (inspect._empty, future, "torch.futures.Future[torch.Tensor]"):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    def _log_and_throw(self, kind: type[Exception], message: str) -> None:
        if self.__dict__.get("logger") is not None:
            self.logger.set_error_and_log(f"{kind}: {message}")
        raise kind(message)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """``hook(state, {name: buffer}) -> list of futures or None`` synchronizes the buffers."""
        if not callable(hook):
            raise TypeError(f"buffer communication hook must be callable, got {hook!r}")
        self.buffer_hook = _BufferCommHook(
            buffer_comm_hook=hook,
            buffer_comm_hook_state=state,
            buffer_comm_hook_location=comm_hook_location,
        )

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """An optimizer that steps in a bucket's hook, right after its reduction."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP: torch has no functional form of it"
            ) from error

    def _setup_in_backward_optimizers(self) -> None:
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )

        handles = dist.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in self._module_parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        if self.check_finite:
            raise RuntimeError("check_finite= looks before optimizer.step(); an optimizer in backward has none")
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self.reducer.optimizer_in_backward = True

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        self._check_finished()

    # ----------------------------------------------------------------------------------------
    # Uneven inputs
    # ----------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context manager for ranks with different numbers of batches; see torch's ``Join``.

        Args:
            divide_by_initial_world_size: divide by all ranks also when some have run out of data;
                otherwise by those that have not.
            enable: ``False`` makes it a no-op.
            throw_on_early_termination: raise on every rank when the first runs out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest rank for which ``rank_cond`` holds. Collective."""
        candidate = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(candidate.item())

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        sync_module_states(
            self.module,
            self.process_group,
            self.broadcast_bucket_size,
            self._authoritative_rank,
            self.parameters_to_ignore,
            self.forward_sync_buffers,
        )

    # ----------------------------------------------------------------------------------------
    # State: pickling, logging, changes after construction
    # ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP pickling is only supported with the default process group: construct without "
                "process_group= to pickle or copy the wrapper, or save ddp.module.state_dict()."
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _TIED_TO_GROUP}
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def _let_go(self) -> None:
        for name in _TIED_TO_GROUP:
            self.__dict__.pop(name, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        state.pop("broadcast_buffers", None)
        torch.nn.Module.__setstate__(self, state)
        self.process_group = dist.group.WORLD
        self._collect_parameters(self.module)
        self._has_rebuilt_buckets = False
        self._delayed = None
        self._make_reducer()
        self._restore_comm_hook()
        self._mixed = MixedPrecision.make(self, self.mixed_precision)
        self._tuner = self._make_tuner()
        live.add(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts and statistics under torch's keys; see :mod:`minddp.logging_data`."""
        return self.logger.data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.set_sample_rate(sample_rate)

    def _set_static_graph(self) -> None:
        """As ``static_graph=True`` in the constructor, which is the better place."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.iteration() > 0:
            self._log_and_throw(RuntimeError, "_set_static_graph should be called before training loop starts")
        if self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True has no effect with a static graph, whose first iteration tells "
                "which parameters are unused.",
                stacklevel=2,
            )
        self.static_graph = True
        self._remake_reducer()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Goes on with another group, after ranks were lost or added; buckets are planned anew."""
        self._has_rebuilt_buckets = False
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
            self._remake_reducer()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Kept for compatibility: outputs are never cloned here, and may be changed in place all the same."""
        self._ddp_sink_clone = val

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Parameters and buffers (names as in ``named_parameters``) that DDP leaves alone; call before wrapping."""
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _get_parameters(self, m: torch.nn.Module, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from m.parameters(recurse=recurse)


# Without their wrappers against torch.compile, which cost some five microseconds each.
_unwrapped_pre_forward, _unwrapped_post_forward, _unwrapped_run = (
    getattr(DistributedDataParallel, name).__wrapped__
    for name in ("_pre_forward", "_post_forward", "_run_ddp_forward")
)

register_optimizer_step_pre_hook(_refuse_unfinished)
