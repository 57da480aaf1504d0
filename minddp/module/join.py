"""Uneven inputs: a rank that ran out of data shadows the collectives of those that have not.

The order of collectives of one iteration, which the hook below must mirror, is: (by torch's Join) the
count of ranks still training; the re-planning of buckets, once; the buffers' broadcast, where forward does
it; the question whether this iteration synchronizes; then the backward's own, with zeros, and that of delayed
parameters. Where layers communicate in forward (SyncBatchNorm), the last is a forward and backward on no rows; see
empty_batch.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ..ranks.waiting import SHADOWED, wait_for
from .empty_batch import EmptyBatch, communicates_in_forward


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
        if ddp._minddp_engine is None:
            raise NotImplementedError(
                "join() does not go with delay_all_reduce_named_params= for every parameter: leave one out of it."
            )
        ddp._minddp_engine.logger.note_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp
        self.empty_batch = EmptyBatch(ddp) if communicates_in_forward(ddp.module) else None
        super().__init__()

    def main_hook(self) -> None:
        ddp, engine = self.ddp, self.ddp._minddp_engine
        # Its last own iteration may wait for finalize_backward(), or for gradients.
        engine.check_finished()
        ddp._minddp_rebuild_buckets()
        engine.note_joined()
        if ddp._check_sync_bufs_pre_fwd():
            with engine.collective():
                ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, False))
        synchronizes = agree_on_sync(ddp, is_joined_rank=True)
        ddp.require_forward_param_sync = synchronizes
        if self.empty_batch is not None:
            self.empty_batch.forward_backward(synchronizes)
        else:
            if synchronizes:
                engine.reducer.shadow_backward()
            if ddp._minddp_delayed is not None:  # whose collective does not mind no_sync
                ddp._minddp_delayed.shadow(synchronizes, ddp._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        if self.empty_batch is not None:
            self.empty_batch.close()
        ddp = self.ddp
        ddp._minddp_engine.note_back()
        ddp._sync_final_model(is_last_joiner)
        # All ranks are here: what follows is like before. Torch's class goes on counting ranks in every forward, and
        # its buffers come from the last of them from now on.
        ddp._join_config = type(ddp._join_config).construct_disabled_join_config()
        ddp._minddp_has_joined = True
        ddp._minddp_engine.reducer.set_divisor(ddp.process_group.size())


def agree_on_sync(ddp: Any, is_joined_rank: bool) -> bool:
    """Tells joined ranks whether this iteration's backward synchronizes. Collective."""
    votes = not is_joined_rank and ddp.require_backward_grad_sync
    tensor = torch.full((1,), float(votes), device=ddp.device)
    work = dist.all_reduce(tensor, group=ddp.process_group, async_op=True)
    if not is_joined_rank:
        return votes  # known here already; only the joined ranks wait for the answer
    wait_for(work, ddp.process_group, SHADOWED)
    return bool(tensor.item() != 0)
