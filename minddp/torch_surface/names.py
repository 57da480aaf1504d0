"""Names that torch's class has, and libraries and PyTorch's own tests reach: each a line here, the work elsewhere."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

from .. import environment
from ..config import Config, warn_about_static_and_unused
from ..members import all_parameters
from ..start import sync_module_states
from .shown import shown

_BROADCAST_BUCKET_BYTES = 250 * 1024 * 1024


class TorchNames:
    """The part of :class:`DistributedDataParallel` that exists for callers of torch's."""

    module: torch.nn.Module
    dim: int
    process_group: Any
    static_graph: bool
    find_unused_parameters: bool
    forward_sync_buffers: bool
    broadcast_bucket_size: int
    use_side_stream_for_tensor_copies: bool
    _minddp_config: Any
    _minddp_engine: Any
    _minddp_delayed: Any
    _minddp_wrapped: Any
    _log_and_throw: Any
    _join_config: Any
    _setup_in_backward_optimizers: Any
    _find_common_rank: Any
    _distributed_rank: Any

    # --- attributes ---

    def _minddp_set_attributes(self, config: Config) -> None:
        """What torch's class has under these names, whatever was there before."""
        for name in ("reducer", "logger"):
            self.__dict__.pop(name, None)
        self.static_graph = config.static_graph
        self.find_unused_parameters = config.find_unused_parameters
        self.gradient_as_bucket_view = config.gradient_as_bucket_view
        self.skip_all_reduce_unused_params = config.skip_all_reduce_unused_params
        self.batched_grad_copy = config.batched_grad_copy
        self.forward_sync_buffers = config.forward_sync_buffers
        self.mixed_precision = config.mixed_precision
        self.bucket_bytes_cap = config.cap
        self.bucket_bytes_cap_default = config.default_caps
        self.broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
        self.use_side_stream_for_tensor_copies = environment.use_side_stream()
        self.require_forward_param_sync = self.require_backward_grad_sync = True
        self._divide_by_initial_world_size = True
        self._lazy_init_ran = False
        self._use_python_reducer = False
        self._ddp_sink_clone = True
        self._minddp_iterations_unchecked = 0

    @shown
    def reducer(self) -> Any:
        """None where every parameter's reduction is delayed."""
        return None if self._minddp_engine is None else self._minddp_engine.reducer

    @shown
    def logger(self) -> Any:
        return None if self._minddp_engine is None else self._minddp_engine.logger

    @shown
    def device(self) -> torch.device:
        return self._minddp_wrapped.device

    @shown
    def device_type(self) -> str:
        return self._minddp_wrapped.device_type

    @shown
    def is_multi_device_module(self) -> bool:
        return self._minddp_wrapped.is_multi_device

    @shown
    def parameters_to_ignore(self) -> set[str]:
        return self._minddp_wrapped.ignored

    @shown
    def _module_parameters(self) -> list[torch.nn.Parameter]:
        return self._minddp_wrapped.module_parameters

    @shown
    def _delay_all_reduce_params(self) -> list[torch.nn.Parameter]:
        return self._minddp_wrapped.delayed

    @shown
    def _delay_all_reduce_all_params(self) -> bool:
        return self._minddp_wrapped.all_delayed

    @shown
    def _has_rebuilt_buckets(self) -> bool:
        return self._minddp_engine is not None and self._minddp_engine.has_rebuilt_buckets

    @shown
    def bucket_bytes_cap_list(self) -> list[int]:
        return list(self._minddp_config.caps) if len(self._minddp_config.caps) > 1 else []

    @shown
    def lazy_bucket_allocation(self) -> bool:
        return self._minddp_config.lazy_bucket_allocation

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _TorchDDP._active_ddp_module

    # --- steps of a forward that is written anew ---

    @contextmanager
    def _inside_ddp_forward(self: Any) -> Iterator[None]:
        """torch.compile looks for the active module, and the other ranks hear of an exception in it."""
        outer = _TorchDDP._active_ddp_module
        _TorchDDP._active_ddp_module = self
        try:
            yield
        except BaseException as error:
            if self._minddp_engine is not None:
                self._minddp_engine.note_words(error)
            raise
        finally:
            _TorchDDP._active_ddp_module = outer

    def _lazy_init(self) -> None:
        """Before the first forward."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _clear_grad_buffer(self) -> None:
        """After a forward: the buffer of the gradients whose reduction is delayed is made ready."""
        if self._minddp_delayed is not None:
            divisor = None if self._minddp_engine is None else self._minddp_engine.reducer.divisor
            self._minddp_delayed.prepare(self._join_config.enable, divisor)

    # --- inputs and outputs ---

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on device ``device_id``: tensors in nested containers, dataclasses, PackedSequence."""
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return torch.nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.nn.parallel.scatter_gather.gather(outputs, output_device, dim=self.dim)

    # --- the reducer ---

    def _minddp_rebuild_buckets(self) -> None:
        self._minddp_engine.rebuild_buckets()

    def _remove_autograd_hooks(self) -> None:
        self._minddp_engine.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        self._minddp_engine.check_finished()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """The parameters to reduce, and for each whether its gradient is sparse."""
        return self._minddp_wrapped.reduced, self._minddp_wrapped.expect_sparse()

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, str]:
        """Index in ``parameters`` -> name; ValueError when the two do not match."""
        return self._minddp_wrapped.debug_mapping(parameters)

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.nn.Parameter],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Called at the end of construction and of unpickling, for subclasses that add to it; does nothing itself."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts and statistics under torch's keys; see :mod:`minddp.torch_surface.logging_data`."""
        return self._minddp_engine.logger.data(self._minddp_engine.reducer)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self._minddp_engine.logger.set_sample_rate(sample_rate)

    # --- changes after construction ---

    def _set_static_graph(self) -> None:
        """As ``static_graph=True`` in the constructor, which is the better place."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._minddp_engine.reducer.iteration() > 0:
            self._log_and_throw(RuntimeError, "_set_static_graph should be called before training loop starts")
        if self.find_unused_parameters:
            warn_about_static_and_unused(stacklevel=3)
        self.static_graph = True
        self._minddp_config = self._minddp_engine.replaced(static_graph=True)
        self._minddp_engine.rebuild(self._minddp_config)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Goes on with another group, after ranks were lost or added; buckets are planned anew."""
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
            if self._minddp_delayed is not None:
                self._minddp_delayed.set_group(new_process_group)
            if self._minddp_engine is not None:
                self._minddp_engine.rebuild(group=new_process_group)
        elif self._minddp_engine is not None:
            self._minddp_engine.has_rebuilt_buckets = False

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Whether outputs that are joined (``joined_outputs.py``) have memory of their own."""
        self._ddp_sink_clone = val

    # --- join ---

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

    # --- the module's parameters ---

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
        for name, tensor in itertools.chain(all_parameters(module), module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _get_parameters(self, m: torch.nn.Module, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from m.parameters(recurse=recurse)
