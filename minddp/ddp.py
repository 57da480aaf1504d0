"""The module: :class:`DistributedDataParallel`, a drop-in for torch's.

What always holds: the constructor either returns a module that is ready on every rank, or raises on every
rank. It subclasses torch's class so that ``isinstance`` checks and torch's distributed checkpoint take it
for one, but runs none of its code: every method is defined here (a test makes torch's raise).

tutorials/mini_ddp.py has the idea in 20 lines, then in 100: read it first.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from . import environment, events, lifetime
from ._C import GraphMode
from .averager import Averager, averagers
from .config import choose_group, make_config
from .functions import FUNCTIONS, module_of
from .hooks import BUILTIN_HOOK_DTYPES, check_signature
from .join import DDPJoinHook, WatchedJoin, agree_on_sync
from .messages import wait_for, work_on
from .options import Options
from .outputs import find_tensors, join_outputs
from .parameters import Parameters, all_parameters, asked_to_ignore
from .start import broadcast_coalesced, sync_module_states, verify_same_start
from .torch_base import TorchBase

__all__ = ["DistributedDataParallel"]

_NO_RANGE = nullcontext()
_BROADCAST_BUCKET_BYTES = 250 * 1024 * 1024
# Given up when the interpreter ends; `device` and the like stay.
_GIVEN_UP = ("process_group", "_minddp_averager", "_minddp_observers")


def _run_module(module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
    """A frame of its own, where torch.compile can begin: it begins in no frame of torch's own modules."""
    return module(*inputs, **kwargs)


class DistributedDataParallel(TorchBase):  # type: ignore[override,misc]
    """Data-parallel training: averages gradients over ranks during ``backward()``.

    Takes torch's arguments in torch's order; replaces ``torch.nn.parallel.DistributedDataParallel``
    without another edit. Every rank constructs it around the same module; rank 0's parameters and
    buffers are copied to the others, every synchronized backward ends with the same gradients on all ranks.

    Args:
        module: the module to parallelize, on its device already.
        device_ids: one CUDA device for a module on that device; ``None`` for CPU and multi-device modules.
        output_device: kept for compatibility; with ``device_ids`` only.
        dim: kept for compatibility (scatter and gather).
        broadcast_buffers: deprecated by torch; use ``forward_sync_buffers``.
        init_sync: verify and broadcast parameters and buffers at construction.
        process_group: group to reduce over; default: the default group. Not with ``device_mesh``.
        bucket_cap_mb: the size in MiB at which a bucket is closed. ``None``, the default: there are about ten
            buckets, each of a tenth of all gradients, but of 2 MiB at least and of 25 at most. The last one is closed
            at 1 MiB, since no backward is left to hide its reduction. A gradient of 25 MiB or more (on the CPU of 4)
            has a bucket of its own, which spares a copy. With ``find_unused_parameters``, with a communication hook,
            and if the program has collectives of its own in backward (SyncBatchNorm), the default is torch's: 1 MiB,
            then 25.
            ``"auto"`` measures bucket sizes while training runs, and takes the best.
        find_unused_parameters: allow parameters that take no part in a backward. Costs no graph walk in forward:
            autograd's engine has found what takes part when backward begins.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: ``.grad`` becomes a view of the bucket: no second copy of gradients. Code that
            looks at ``.grad`` while backward runs may see scaled or half-reduced values; without it, never.
        static_graph: the same parameters are used, equally often, in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs reduced together, once, when the gradient
            of ``param_to_hook_all_reduce`` is there. Not with ``reduction`` or ``check_finite``.
        param_to_hook_all_reduce: see above; both or neither. Its gradient must come after theirs.
        mixed_precision: torch's ``_MixedPrecision``: dtypes of parameters, reduction and buffers.
        device_mesh: a 1-D mesh in place of ``process_group``.
        skip_all_reduce_unused_params: buckets without a used parameter are not reduced; such
            buckets must be the same on all ranks.
        bucket_cap_mb_list: one cap a bucket, in launch order; the last one repeats.
        batched_grad_copy: accepted, without effect: on a device a bucket is always packed in one pass.
        forward_sync_buffers: broadcast rank 0's buffers before each forward (default ``True``).
        lazy_bucket_allocation: a bucket has memory from its first gradient to the end of backward only; where a
            gradient is reduced in its own memory (see ``gradient_as_bucket_view``), none at all.
        options: the arguments that companions add; see below.

    Raises:
        RuntimeError: no parameter requires a gradient, uninitialized parameters, models that differ between ranks (on
            every rank, naming parameter, shapes and ranks).
        ValueError, TypeError: no process group; arguments that contradict each other, make no sense or differ
            between ranks (on every rank), each named.
    """

    _minddp_has_joined = False
    _minddp_cast: Callable[[Any, Any], tuple[Any, Any]] | None = None  # with mixed_precision, of forward's inputs

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
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        **options: Unpack[Options],
    ):
        TorchBase.__init__(self)
        module_of(module, "DistributedDataParallel")
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and has no effect.", FutureWarning, stacklevel=2)
        self.process_group = choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.dim = dim
        self.module = module
        self._minddp_config = make_config(
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        torchs = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
        }
        given = {name: value for name, value in torchs.items() if value is not None}
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        self._minddp_observe(events.parse({**given, **options}, known))
        self._minddp_wrapped = Parameters(module, asked_to_ignore(module), self._minddp_apart)
        work_on(self.process_group, self._minddp_wrapped.device)
        self.device_ids, self.output_device = self._minddp_wrapped.check_devices(device_ids, output_device)
        self.require_forward_param_sync = self.require_backward_grad_sync = True
        self.forward_sync_buffers = self._minddp_config.forward_sync_buffers
        self.broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
        self.use_side_stream_for_tensor_copies = environment.use_side_stream()
        self._divide_by_initial_world_size = self._ddp_sink_clone = True
        token = None
        if init_sync:
            with self._minddp_observers.together():
                token = self._minddp_synchronize_model()
        self._minddp_average(token)

    def _minddp_observe(self, settings: dict[str, Any]) -> None:
        self._minddp_observers = events.Observers(self, settings)
        # Names of parameters that a companion averages by itself, which tells them in `constructing`.
        self._minddp_apart: set[str] = set()
        if self._minddp_config.auto_tune and not self._minddp_observers.tune_buckets():
            raise TypeError(
                'DistributedDataParallel: bucket_cap_mb="auto" needs a companion that measures buckets, and none is '
                "attached. Unset MINDDP_PLAIN and MINDDP_WITHOUT, or pass a number of MiB."
            )
        for call in self._minddp_observers.constructing:
            call(self)

    def _minddp_synchronize_model(self) -> str:
        """The same model on every rank; returns a token that all ranks have, and nothing else has."""
        wrapped, group, observers = self._minddp_wrapped, self.process_group, self._minddp_observers
        self._assign_modules_buffers()
        names = [name for name, _ in all_parameters(self.module)]
        with_buffers = self._minddp_config.sync_buffers_at_start
        buffers = list(self.named_module_buffers.items()) if with_buffers else []
        parameters = list(zip(wrapped.names, wrapped.reduced))
        arguments = {**self._minddp_config.for_comparison(), "companions": observers.names()}
        for call in observers.compared:
            arguments |= call(wrapped)
        token, sent = verify_same_start(
            arguments, parameters, names, buffers, group, [call() for call in observers.exchange]
        )
        for call, everyone in zip(observers.exchanged, sent):
            call(everyone)
        wrapped.check_materialized()
        sync_module_states(self.module, group, self.broadcast_bucket_size, 0, wrapped.ignored, with_buffers)
        return token

    def _minddp_average(self, token: str | None) -> None:
        """The end of construction, and of unpickling: only now anything outside of this object knows of it."""
        wrapped, observers = self._minddp_wrapped, self._minddp_observers
        self._assign_modules_buffers()
        self._minddp_averager: Any = Averager(
            self.module, self._minddp_config, wrapped, self.process_group, observers
        )
        for other in averagers():
            if other is not self._minddp_averager:
                other.yield_ownership(wrapped.reduced)
        lifetime.end_in_order(self)
        if token is not None:
            for call in observers.named:
                call(token)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in FUNCTIONS:
                raise
            raise AttributeError(f"{error}. It is a function of the package: minddp.{name}(ddp)") from None

    # ----------------------------------------------------------------------------------------
    # Forward
    # ----------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; gradients of what it returns are averaged in backward."""
        # A range costs ten microseconds, whether or not anybody looks.
        with record_function("DistributedDataParallel.forward") if profiler._is_profiler_enabled else _NO_RANGE:
            # Libraries override these steps (mmcv's wrapper its _run_ddp_forward), and programs patch them.
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @torch._disable_dynamo(recursive=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        averager = self._minddp_averager
        grad, joining = torch.is_grad_enabled(), self._join_config.enable
        if grad:
            self._minddp_synchronizes()
            averager.before_forward(joining)
        self._minddp_note_not_joined()
        if grad and not averager.is_settled:
            averager.rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            with self._minddp_observers.together():
                self._sync_buffers()
        if joining:
            agree_on_sync(self, is_joined_rank=False)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._minddp_cast is not None:
            inputs, kwargs = self._minddp_cast(inputs, kwargs)
        if grad:
            averager.reducer.begin_forward()
        return inputs, kwargs

    @torch._disable_dynamo(recursive=True)
    def _post_forward(self, output: Any) -> Any:
        reducer, grad = self._minddp_averager.reducer, torch.is_grad_enabled()
        if self._check_sync_bufs_post_fwd():
            with self._minddp_observers.together():
                self._sync_buffers()
        synchronized = grad and reducer.sync_enabled
        self.__dict__["require_forward_param_sync"] = synchronized
        if grad and self._minddp_config.graph_mode == GraphMode.FIND_UNUSED:
            output = join_outputs(output, clones=self._ddp_sink_clone)
        outputs = find_tensors(output)
        if grad:
            reducer.end_forward(outputs, synchronized)
        for call in self._minddp_observers.after_forward:
            call(outputs, synchronized)
        return output

    # torch.compile looks for the active module to split graphs where buckets end. Dynamo leaves this frame alone
    # and begins in the next.
    @torch._disable_dynamo(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return _run_module(self.module, inputs, kwargs)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """torch.compile looks for the active module, and the other ranks may learn of an exception in it."""
        outer = _TorchDDP._active_ddp_module
        _TorchDDP._active_ddp_module = self
        try:
            yield
        except BaseException as error:
            self._minddp_averager.failed(error, "forward")
            raise
        finally:
            _TorchDDP._active_ddp_module = outer

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on device ``device_id``: tensors in nested containers, dataclasses, PackedSequence."""
        device = torch.device(self._minddp_wrapped.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module. An observer may refuse: a device may have stepped with partial sums, for example."""
        observers = self.__dict__.get("_minddp_observers")  # a subclass may skip the constructor
        for call in () if observers is None else observers.saving:
            call()
        return super().state_dict(*args, **kwargs)

    def _minddp_note_not_joined(self) -> None:
        work = Join.notify_join_context(self)
        if work is None:
            return
        wait_for(work, self.process_group, "the count of ranks that still have data")
        active = work.get_future().value()[0]
        initial = self._divide_by_initial_world_size
        self._minddp_averager.set_divisor(self.process_group.size() if initial else int(active.item()))

    # ----------------------------------------------------------------------------------------
    # Synchronization: when, and how a backward ends
    # ----------------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of a forward that runs now is synchronized; ``no_sync`` sets it, libraries too.

        It stands among the instance's attributes, as with torch's class: a class's attribute does not hide it.
        """
        return bool(self.__dict__.get("require_backward_grad_sync", True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["require_backward_grad_sync"] = value
        self._minddp_synchronizes()

    @require_backward_grad_sync.deleter
    def require_backward_grad_sync(self) -> None:
        """What ``unittest.mock.patch.object`` does at its end."""
        self.require_backward_grad_sync = True

    def _minddp_synchronizes(self) -> bool:
        """What holds now, which the reducer is told. A subclass may have an attribute of its own for it."""
        synchronizes = bool(self.require_backward_grad_sync)
        averager = self.__dict__.get("_minddp_averager")
        if averager is not None:
            averager.reducer.sync_enabled = synchronizes
        return synchronizes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside accumulate locally; the next backward of one outside averages all of it.

        What counts is where *forward* runs, as in torch: a backward outside of a forward that ran inside stays local,
        and an optimizer's step on it warns. Steps on local gradients (local SGD) are fine.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self._minddp_synchronizes()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            self._minddp_synchronizes()

    # ----------------------------------------------------------------------------------------
    # Buffers: rank 0's on every rank, before forward or after it; the last rank's once there was a join, as in torch
    # ----------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _assign_modules_buffers(self) -> None:
        self.named_module_buffers = self._minddp_wrapped.buffers(self.module)
        self.modules_buffers = list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self._minddp_syncs_after()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._minddp_syncs_after()

    def _minddp_syncs_after(self) -> bool:
        hook = self.__dict__.get("buffer_hook")
        return hook is not None and hook.buffer_comm_hook_location == _BufferCommHookLocation.POST_FORWARD

    def _sync_buffers(self) -> None:
        vmap = torch._C._functorch.TransformType.Vmap
        if any(level.key() != vmap for level in torch._C._functorch.get_interpreter_stack() or ()):
            raise RuntimeError(
                "DistributedDataParallel: buffers cannot be broadcast inside of a torch.func transform other than "
                "vmap, which forbids writing to tensors of the module. Construct with forward_sync_buffers=False, or "
                "transform ddp.module."
            )
        with torch.no_grad():
            if self._join_config.enable:
                source = self._find_common_rank(self._distributed_rank, True)
            else:
                source = self.process_group.size() - 1 if self._minddp_has_joined else 0
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
            if not isinstance(future, torch._C.Future):
                raise TypeError(
                    f"a buffer communication hook must return a list of futures, or None; it has {future!r}"
                )
            self._minddp_averager.reducer.wait_after_backward(future)

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
            named = self.named_module_buffers.items()
            broadcast_coalesced(self.process_group, list(tensors), buffer_size, authoritative_rank, named)

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

    @property
    def _distributed_rank(self) -> int:
        return int(self.process_group.rank())

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest rank for which ``rank_cond`` holds. Collective."""
        candidate = torch.full((1,), input_rank if rank_cond else -1, device=self._minddp_wrapped.device)
        group = self.process_group
        work = dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=group, async_op=True)
        wait_for(work, group, "the choice of the rank whose buffers all take")
        return int(candidate.item())

    # ----------------------------------------------------------------------------------------
    # Communication hooks
    # ----------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket) -> torch.futures.Future[torch.Tensor]`` reduces buckets from the next backward on.

        Hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` fit. A hook divides by the
        world size itself; its future holds one tensor with as many elements as ``bucket.buffer()``.

        Raises:
            TypeError, ValueError: the hook is not callable, or its signature is another one.
            RuntimeError: a hook is registered already, or the last backward was not finished.
        """
        self._check_comm_hook(hook)
        self._minddp_check_hook_time()
        self._minddp_averager.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's built-in C++ hooks: here, the dtype in which gradients travel."""
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in BUILTIN_HOOK_DTYPES:
            raise ValueError(f"comm_hook_type must be one of dist.BuiltinCommHookType, got {comm_hook_type!r}")
        self._minddp_check_hook_time()
        self._minddp_averager.set_hook(None, comm_hook_type)

    def _minddp_check_hook_time(self, steps: bool = False) -> None:
        averager = self._minddp_averager
        if averager.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        averager.check_finished()
        for call in self._minddp_observers.hooking:
            call(steps)

    def _check_comm_hook(self, hook: Any) -> None:
        try:
            check_signature(hook)
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        if self.__dict__.get("_minddp_averager") is not None:
            self._minddp_averager.failed(f"{err_type}: {err_msg}", "call")
        raise err_type(err_msg)

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
        return WatchedJoin(
            self,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._minddp_has_joined = False
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        sync_module_states(
            self.module,
            self.process_group,
            self.broadcast_bucket_size,
            self._authoritative_rank,
            self._minddp_wrapped.left_alone,
            self.forward_sync_buffers,
        )

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self._minddp_wrapped.device
        return device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _minddp_let_go(self) -> None:
        """Of the process group and all that works with it; nothing can be done with the wrapper any more."""
        self.__dict__.update(dict.fromkeys(_GIVEN_UP))


def complete_signature() -> None:
    """Shows the arguments that companions add, in the constructor's signature and in the class's docstring."""
    own = [p for p in inspect.signature(DistributedDataParallel.__init__).parameters.values() if p.name != "options"]
    own = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    types = {name: getattr(hint, "__forward_arg__", hint) for name, hint in Options.__annotations__.items()}
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types.get(name, inspect.Parameter.empty)
        )
        for name, default in events.all_options().items()
        if name not in {p.name for p in own}
    ]
    DistributedDataParallel.__init__.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    texts = [companion.arguments.strip("\n").rstrip() for companion in events.registered()]
    text = "".join(f"{text}\n" for text in texts if text)
    before, options, after = (DistributedDataParallel.__doc__ or "").partition(_OPTIONS)
    DistributedDataParallel.__doc__ = before + (text or options) + after


_OPTIONS = "        options: the arguments that companions add; see below.\n"
