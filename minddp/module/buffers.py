"""Buffers: rank 0's on every rank, before forward or after it; the last rank's once there was a join, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ..ranks.broadcast import broadcast_coalesced
from ..ranks.waiting import wait_for


class BufferSync:
    """The part of :class:`DistributedDataParallel` that keeps buffers alike; names are torch's."""

    process_group: Any
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    broadcast_bucket_size: int
    _minddp_wrapped: Any
    _minddp_engine: Any
    _join_config: Any
    _minddp_has_joined = False
    device: torch.device
    module: torch.nn.Module

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
        location = _BufferCommHookLocation.PRE_FORWARD
        return self.will_sync_module_buffers() and self._minddp_buffer_hook_location(location) == location

    def _check_sync_bufs_post_fwd(self) -> bool:
        location = _BufferCommHookLocation.POST_FORWARD
        return (
            self.will_sync_module_buffers()
            and self._minddp_buffer_hook_location(_BufferCommHookLocation.PRE_FORWARD) == location
        )

    def _minddp_buffer_hook_location(self, default: Any) -> Any:
        hook = self.__dict__.get("buffer_hook")
        return default if hook is None else hook.buffer_comm_hook_location

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
            self._minddp_engine.reducer.wait_after_backward(future)

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
        candidate = torch.full((1,), input_rank if rank_cond else -1, device=self.device)
        group = self.process_group
        work = dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=group, async_op=True)
        wait_for(work, group, "the choice of the rank whose buffers all take")
        return int(candidate.item())
