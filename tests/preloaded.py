"""What the ranks of tests need, imported once in each fork server; no thread is started (`tests/forked.py`)."""

import gc
import importlib
import weakref
from unittest import mock

import torch

for name in (
    "numpy", "pytest", "torch._dynamo", "torch._dynamo.backends.common",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torch.distributed.algorithms.join",
    "torch.distributed.optim", "torch.func", "torch.nn.parallel.distributed", "torch.utils.checkpoint",
    "minddp", "tests.ranks_pool",
):  # fmt: skip
    importlib.import_module(name)

# The first step of an optimizer imports a good part of torch.
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
with mock.patch("torch.cuda.is_available", return_value=False):  # to ask it starts a thread where there is a GPU
    torch.optim.Adam([parameter], foreach=False).step()
    torch.optim.SGD([parameter]).step()
torch.func.functional_call(torch.nn.Linear(1, 1), {}, (torch.zeros(1, 1),))
if torch.version.cuda is None:  # torch.manual_seed() keeps the caller's stack for each device that is not there
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None
for finalizer in weakref.finalize._registry:
    finalizer.atexit = False  # of torch's operators: a tenth of a second at each rank's end, for nothing
gc.collect()
gc.freeze()  # neither walked nor, in the forked ranks, copied
