"""DDP in 100 lines: broadcast, buckets, hooks, one order of launches, no_sync.

    python tutorials/mini_ddp.py                                # two ranks on this machine
    torchrun --nproc-per-node 4 tutorials/mini_ddp.py

It needs torch alone. NaiveDDP comes first: the idea in 20 lines, with one all-reduce for each parameter. MiniDDP
sends few large buckets, in one order, and has no_sync. Each parameter must get one gradient in each backward. The
real reducer (csrc/reducer) cuts the same buckets, does the same steps under the same names, and handles what else can
happen. A test holds buckets and gradients equal, bit for bit.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# torch imports this at the first optimizer, and its default arguments keep the default group of that moment. Imported
# before there is one, it keeps none: the group's threads end in destroy_process_group(), and do not outlive Python.
import torch.distributed.nn.functional
import torch.multiprocessing
from torch import nn
from torch.autograd import Variable


class NaiveDDP(nn.Module):
    """Each gradient leaves when it is there, while backward goes on. It pays a latency for each parameter, and relies
    on all ranks' gradients coming in one order."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.launched: list[Any] = []
        # All ranks begin with rank 0's weights. After that, equal gradients keep them equal.
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.on_ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def on_ready(self, parameter: nn.Parameter) -> None:
        """Autograd calls this in backward, when ``parameter.grad`` is complete."""
        if not self.launched:  # the first gradient of this backward: call us again when backward is over
            Variable._execution_engine.queue_callback(self.finish_backward)
        parameter.grad /= dist.get_world_size()
        self.launched.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish_backward(self) -> None:
        """Autograd calls this at the end of backward, before ``loss.backward()`` returns."""
        for work in self.launched:
            work.wait()
        self.launched.clear()


class Bucket:
    """Parameters that share one flat buffer, and so one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]):
        sizes = [parameter.numel() for parameter in parameters]
        self.parameters = parameters
        self.buffer = parameters[0].new_zeros(sum(sizes))
        self.parts = dict(zip(parameters, self.buffer.split(sizes), strict=True))
        self.pending = len(parameters)  # gradients that have not come yet

    def copy_in(self, parameter: nn.Parameter) -> None:
        torch.div(parameter.grad.reshape(-1), dist.get_world_size(), out=self.parts[parameter])

    def copy_out(self) -> None:
        for parameter, part in self.parts.items():
            parameter.grad.copy_(part.view_as(parameter))
        self.pending = len(self.parameters)


class MiniDDP(nn.Module):
    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25):
        super().__init__()
        self.module = module
        self.synchronized = True
        self.launched: list[Any] = []
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.buckets = [Bucket(group) for group in assign(list(module.parameters()), bucket_cap_mb * 2**20)]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.on_ready, bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def on_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if not self.synchronized:
            return  # the gradient stays in .grad, and the next backward adds to it
        if all(b.pending == len(b.parameters) for b in self.buckets):  # the first gradient of this backward
            Variable._execution_engine.queue_callback(self.finish_backward)
        bucket.copy_in(parameter)
        self.mark_variable_ready(bucket)

    def mark_variable_ready(self, bucket: Bucket) -> None:
        """A bucket leaves when it is complete and all before it have left: all ranks then send the same one."""
        bucket.pending -= 1
        while len(self.launched) < len(self.buckets) and self.buckets[len(self.launched)].pending == 0:
            self.launched.append(self.launch(self.buckets[len(self.launched)]))

    def launch(self, bucket: Bucket) -> Any:
        return dist.all_reduce(bucket.buffer, async_op=True)  # backward goes on meanwhile

    def finish_backward(self) -> None:
        for work, bucket in zip(self.launched, self.buckets, strict=True):
            self.unpack(work, bucket)
        self.launched.clear()

    def unpack(self, work: Any, bucket: Bucket) -> None:
        work.wait()
        bucket.copy_out()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronized = False
        try:
            yield
        finally:
            self.synchronized = True


def assign(parameters: list[nn.Parameter], cap_bytes: float) -> list[list[nn.Parameter]]:
    """Buckets in the order in which they leave.

    They are filled from the first parameter on, whose gradient comes last, so what is left over leaves first. A
    bucket is closed when it has reached the cap. It then still takes what is small, such as the bias of the same
    layer: in the next bucket it would be the last gradient to come.
    """
    buckets: list[list[nn.Parameter]] = []
    size, room = cap_bytes, 0.0
    for parameter in parameters:
        room -= parameter.nbytes
        if size >= cap_bytes and room < 0:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        if size < cap_bytes:
            size += parameter.nbytes
            room = cap_bytes / 16
    return [bucket[::-1] for bucket in buckets[::-1]]


def train() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other weights and other data on each rank
    net = MiniDDP(
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
        bucket_cap_mb=0.001,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(1, 201):
        x = torch.randn(32, 8)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 50 == 0:
            print(f"steps {step - 49:3} to {step:3}: mean loss {sum(losses[-50:]) / 50:5.2f}")
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    # Each rank began with other weights and saw other data.
    print(f"rank {rank}: {len(net.buckets)} buckets; the weights are rank 0's: {torch.equal(mine, first)}")


def start(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started this rank
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(start, (f"file://{folder}/store",), nprocs=2)
