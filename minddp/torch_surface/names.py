"""Names that torch's class has, and libraries and PyTorch's own tests reach: each a line here, the work elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

from ..config import warn_about_static_and_unused
from ..parameters import Parameters, all_parameters
from ..torch_base import fill
from .graph_splits import cap_of_graphs
from .shown import shown


def _surface(ddp: Any) -> Any:
    """The wrapper's observer; None once the interpreter ends, and the wrapper has let go of what it works with."""
    return ddp._minddp_observers and ddp._minddp_observers.get("torch_surface")


def _log_of(ddp: Any) -> Any:
    if (surface := _surface(ddp)) is None or surface.logger is None:
        raise RuntimeError("This wrapper has no log: MINDDP_WITHOUT leaves out torch_surface.")
    return surface.logger


def _collected(ddp: Any) -> Parameters:
    """The module's parameters of now; the wrapper goes on with those that it has."""
    found = copy.copy(ddp._minddp_wrapped)
    found.collect()
    return found


# What torch's class has and nobody is known to call: name -> the way out.
REFUSED = {
    "_ddp_init_helper": "minddp.refresh(ddp) takes over what has changed in the module, on all ranks.",
    "_lazy_init": "Nothing waits for the first forward here: leave it out.",
    "_clear_grad_buffer": "The wrapper's forward makes the buffer of delayed gradients ready: leave it out.",
    "_get_parameters": "Use ddp.module.parameters().",
    "scatter": "Use torch.nn.parallel.scatter_gather.scatter_kwargs, or ddp.to_kwargs().",
    "gather": "Use torch.nn.parallel.scatter_gather.gather.",
}


class TorchNames:
    """What :class:`DistributedDataParallel` has for callers of torch's: ``torch_base`` gets all of these names."""

    # --- attributes ---

    @shown
    def reducer(self: Any) -> Any:
        """None once the interpreter ends."""
        return self._minddp_averager and self._minddp_averager.reducer

    @shown
    def logger(self: Any) -> Any:
        return _surface(self) and _surface(self).logger

    @shown
    def device(self: Any) -> torch.device:
        return self._minddp_wrapped.device

    @shown
    def device_type(self: Any) -> str:
        return self._minddp_wrapped.device_type

    @shown
    def is_multi_device_module(self: Any) -> bool:
        return self._minddp_wrapped.is_multi_device

    @shown
    def parameters_to_ignore(self: Any) -> set[str]:
        return self._minddp_wrapped.ignored

    @shown
    def _module_parameters(self: Any) -> list[torch.nn.Parameter]:
        return self._minddp_wrapped.module_parameters

    @shown
    def _delay_all_reduce_params(self: Any) -> list[torch.nn.Parameter]:
        return _surface(self).settings.delayed

    @shown
    def _delay_all_reduce_all_params(self: Any) -> bool:
        return not self._minddp_wrapped.names

    @shown
    def _has_rebuilt_buckets(self: Any) -> bool:
        return self._minddp_averager.has_rebuilt_buckets

    @shown
    def bucket_bytes_cap(self: Any) -> int:
        """While forward runs torch.compile reads it, and splits the module's graph by it."""
        active = self._get_active_ddp_module() is self
        return cap_of_graphs(self._minddp_averager) if active else self._minddp_config.cap

    @shown
    def bucket_bytes_cap_list(self: Any) -> list[int]:
        return list(self._minddp_config.caps) if len(self._minddp_config.caps) > 1 else []

    @shown
    def lazy_bucket_allocation(self: Any) -> bool:
        return self._minddp_config.lazy_bucket_allocation

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _TorchDDP._active_ddp_module

    # --- the reducer ---

    def _remove_autograd_hooks(self: Any) -> None:
        self._minddp_averager.reducer.remove_hooks()

    def _check_reducer_finalized(self: Any) -> None:
        self._minddp_averager.check_finished()

    def _build_params_for_reducer(self: Any) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """The module's parameters to reduce, as they are now, and for each whether its gradient is sparse."""
        found = _collected(self)
        return found.reduced, found.expect_sparse()

    def _build_debug_param_to_name_mapping(self: Any, parameters: Sequence[torch.nn.Parameter]) -> dict[int, str]:
        """Index in ``parameters`` -> name; ValueError when the two do not match."""
        found = _collected(self)
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        for name, parameter in zip(found.names, found.reduced):
            if id(parameter) not in index:
                raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
        if len(index) != len(found.names):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got "
                f"{len(index)} parameters and {len(found.names)} names."
            )
        return {index[id(p)]: name for name, p in zip(found.names, found.reduced)}

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        """Facts and statistics under torch's keys; see :mod:`minddp.torch_surface.logging_data`."""
        return _log_of(self).data()

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        _log_of(self).set_sample_rate(sample_rate)

    # --- changes after construction ---

    def _set_static_graph(self: Any) -> None:
        """As ``static_graph=True`` in the constructor, which is the better place."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._minddp_averager.reducer.iteration() > 0:
            self._log_and_throw(RuntimeError, "_set_static_graph should be called before training loop starts")
        if self.find_unused_parameters:
            warn_about_static_and_unused(stacklevel=3)
        self.static_graph = True
        self._minddp_config = dataclasses.replace(self._minddp_averager.config, static_graph=True)
        self._minddp_averager.rebuild(self._minddp_config)

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        """Goes on with another group, after ranks were lost or added; buckets are planned anew."""
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
            if (delayed := _surface(self).delayed) is not None:
                delayed.set_group(new_process_group)
            self._minddp_averager.rebuild(group=new_process_group)
        else:
            self._minddp_averager.has_rebuilt_buckets = False

    def _set_ddp_sink_clone(self: Any, val: bool) -> None:
        """Whether outputs that are joined (``outputs.py``) have memory of their own."""
        self._ddp_sink_clone = val

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

    # --- communication hooks that run an optimizer ---

    def _register_fused_optim(self: Any, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """An optimizer that steps in a bucket's hook, right after its reduction."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP: torch has no functional form of it"
            ) from error

    def _setup_in_backward_optimizers(self: Any) -> None:
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._minddp_wrapped.module_parameters):
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )

        handles = dist.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in self._minddp_wrapped.module_parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        self._minddp_check_hook_time(steps=True)
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self._minddp_averager.reducer.optimizer_in_backward = True


def _refused(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"DistributedDataParallel.{name} is left out of minddp. {REFUSED[name]}")

    method.__name__ = name
    return method


fill(TorchNames)
fill(type("Refused", (), {name: _refused(name) for name in REFUSED}))
