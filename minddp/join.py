"""Uneven inputs: a rank that ran out of data shadows the collectives of those that have not.

The order of collectives of one iteration, which the hook below must mirror, is: (by torch's Join) the
count of ranks still training; the re-planning of buckets, once; the buffers' broadcast, where forward does
it; the question whether this iteration synchronizes; then the backward's own, with zeros, and those of companions.

A rank that is out of data cannot shadow the collectives of layers that communicate in forward (SyncBatchNorm): it has
no forward. The answers to that question say which ranks are out of data, and all ranks raise before such a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from .messages import SHADOWED, CommunicatesInForward, wait_for


class WatchedJoin(Join):
    """torch's ``Join`` of one wrapper: a rank that has run out of data learns, too, who is lost."""

    def __init__(self, ddp: Any, *args: Any, **kwargs: Any):
        super().__init__([ddp], *args, **kwargs)
        self._ddp = ddp

    def _get_num_nonjoined_procs(self) -> float:
        """How many ranks still have data. Collective, beside the others' forwards: the name is torch's."""
        count = torch.zeros(1, device=self._ddp.join_device)
        group = self._ddp.join_process_group
        wait_for(dist.all_reduce(count, group=group, async_op=True), group, SHADOWED)
        return count.item()


class DDPJoinHook(JoinHook):
    """What a joined rank does for one DistributedDataParallel; see :meth:`DistributedDataParallel.join`."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool):
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        ddp, averager, observers = self.ddp, self.ddp._minddp_averager, self.ddp._minddp_observers
        # Its last own iteration may wait for finalize_backward(), or for gradients.
        averager.check_finished()
        averager.rebuild_buckets()
        for call in observers.joined:
            call(True)
        if ddp._check_sync_bufs_pre_fwd():
            with observers.together():
                ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, False))
        synchronizes = agree_on_sync(ddp, is_joined_rank=True)
        ddp.require_forward_param_sync = synchronizes
        if synchronizes:
            averager.shadow_backward()
        for call in observers.shadowed:
            call(synchronizes, ddp._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        _leave(self.ddp)
        self.ddp._sync_final_model(is_last_joiner)
        # From now on buffers come from the last rank, as with torch's class, which also goes on counting ranks.
        self.ddp._minddp_has_joined = True


def _leave(ddp: Any) -> None:
    """All ranks are here: what follows is like before."""
    for call in ddp._minddp_observers.joined:
        call(False)
    ddp._join_config = type(ddp._join_config).construct_disabled_join_config()
    ddp._minddp_averager.set_divisor(ddp.process_group.size())


def agree_on_sync(ddp: Any, is_joined_rank: bool) -> bool:
    """Tells joined ranks whether this iteration's backward synchronizes. Collective.

    Raises:
        RuntimeError: on all ranks, if a rank is out of data and another's layers communicate in this forward.
    """
    group = ddp.process_group
    votes = not is_joined_rank and ddp.require_backward_grad_sync
    communicates = not is_joined_rank and any(map(_is_in_use, _communicating_layers(ddp.module).values()))
    joined = [float(is_joined_rank and rank == group.rank()) for rank in range(group.size())]
    answers = torch.tensor([float(votes), float(communicates), *joined], device=ddp._minddp_wrapped.device)
    work = dist.all_reduce(answers, group=group, async_op=True)
    if not is_joined_rank and not communicates:
        return votes  # known here already; only the joined ranks wait for the answer
    wait_for(work, group, SHADOWED if is_joined_rank else "whether all ranks still have data")
    voted, communicate, *joined = answers.tolist()
    if communicate and any(joined):
        _leave(ddp)
        raise RuntimeError(_uneven([rank for rank, out_of_data in enumerate(joined) if out_of_data], ddp.module))
    return voted != 0


def _communicating_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers, by name, that call collectives in forward: SyncBatchNorm, minddp's and torch's."""
    kinds = (nn.SyncBatchNorm, CommunicatesInForward)
    # isinstance() may call the program's code.
    return {name: layer for name, layer in module.named_modules() if issubclass(type(layer), kinds)}


def _is_in_use(layer: Any) -> bool:
    """Not in eval mode, nor in a group of one rank."""
    return layer.training and dist.get_world_size(getattr(layer, "process_group", None)) > 1


def _uneven(joined: Sequence[int], module: nn.Module) -> str:
    out_of_data = f"rank {joined[0]} is" if len(joined) == 1 else f"ranks {', '.join(map(str, joined))} are"
    names = [repr(name) for name in _communicating_layers(module)]
    layers = f"SyncBatchNorm {names[0]}" + (f" and {len(names) - 1} more such layers" if len(names) > 1 else "")
    return (
        f"join(): {out_of_data} out of data and the others are not, and the model's {layers} would wait for the "
        "batches of all ranks. Give all ranks the same number of batches, as torch's DistributedSampler does, or "
        "pass join(throw_on_early_termination=True) and end the epoch on all ranks where it raises."
    )
