"""What the server of rank processes imports before it forks them; nothing here starts a thread."""

import gc

import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.algorithms.join
import torch.func
import torch.nn.parallel.distributed
import torch.utils.checkpoint

import minddp
from minddp.guards import times

from . import interpreter

__all__ = ["interpreter", "minddp", "torch"]

# The first step of an optimizer imports a good part of torch.
_p = torch.nn.Parameter(torch.zeros(1))
_p.grad = torch.zeros(1)
torch.optim.Adam([_p], foreach=False).step()
torch.optim.SGD([_p]).step()
torch.func.functional_call(torch.nn.Linear(1, 1), {}, (torch.zeros(1, 1),))
gc.collect()
gc.freeze()  # neither walked nor, in the forked ranks, copied

# Groups give up after some seconds here; who asks the other ranks hears of them sooner.
times.look = 0.2
