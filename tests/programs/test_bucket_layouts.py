"""Numbers of communication hooks that depend on what travels together: buckets are torch's where a hook sees them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Linear, Sequential

import minddp
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import those_that_differ

MODES = {
    "default": {},
    "small": {"bucket_cap_mb": 0.002},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    "static": {"static_graph": True, "bucket_cap_mb": 0.002},
    "torch's": {"bucket_cap_mb": 25},
    "list": {"bucket_cap_mb_list": [0.001, 0.003]},
    "list of one": {"bucket_cap_mb_list": [0.002]},
    "unused": {"find_unused_parameters": True},
}


def _model(width=20, static_graph=False, **_):
    """Of three dtypes. Of one in a static graph, in whose first iteration torch's class gives all kinds' buckets one
    index; with a layer that is never used."""
    torch.manual_seed(5)
    layers = [Linear(width, width) for _ in range(5)]
    if static_graph:
        layers[0].register_module("idle", Linear(width, width))
    else:
        layers[2].double()
        layers[4].to(torch.bfloat16)
    return _Casting(*layers)


class _Casting(Sequential):
    """Calls its layers in an order that is not that of their registration, each in its dtype."""

    def forward(self, inputs):
        for layer in (*self[1:], self[0]):
            inputs = layer(inputs.to(layer.weight.dtype)).tanh()
        return inputs


def _steps(ddp, rank, width=20, count=4):
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(count):
        optimizer.zero_grad()
        ddp(torch.randn(6, width, generator=generator)).square().sum().backward()
        optimizer.step()
    return list(ddp.parameters())


def seen_layouts(wrap, rank, width=20, **arguments):
    ddp = wrap(_model(width, **arguments), **arguments)
    index = {id(p): i for i, p in enumerate(ddp.parameters())}
    seen = []

    def hook(state, bucket):
        held = [index[id(p)] for p in bucket.parameters()]
        seen.append([bucket.index(), bucket.is_last(), *held, *[-1] * (len(index) - len(held))])
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    weights = _steps(ddp, rank, width)
    return [*weights, torch.tensor(seen), torch.tensor(len(seen))]


def above_the_first_cap(wrap, rank, **arguments):
    return seen_layouts(wrap, rank, width=300, **arguments)


def a_scale_for_each_bucket(wrap, rank, **arguments):
    """Signs and one scale, with what they lose kept by the bucket's index."""
    ddp = wrap(_model(**arguments), **arguments)
    losses = {}

    def hook(state, bucket):
        sent = bucket.buffer() + losses.get((bucket.index(), bucket.buffer().numel()), 0)
        coded = sent.sign() * sent.abs().mean()
        losses[bucket.index(), bucket.buffer().numel()] = sent - coded
        future = dist.all_reduce(coded / dist.get_world_size(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    return _steps(ddp, rank)


class _Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(20, 3, dtype=torch.complex64))
        self.bias = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = torch.nn.Parameter(torch.randn(()))

    def forward(self, inputs):
        return self.scale * torch.view_as_real(inputs.to(self.weight.dtype) @ self.weight + self.bias)


def complex_gradients(wrap, rank, **arguments):
    """A hook sees pairs of real numbers: it may cast and clamp them."""
    ddp = wrap(_Complex(), **arguments)
    seen = []

    def hook(state, bucket):
        seen.append([bucket.buffer().numel(), bucket.buffer().is_complex()])
        if issubclass(wrap, minddp.DistributedDataParallel):  # torch's class shows the first half of each
            shapes = [(g.shape, g.dtype) for g in bucket.gradients()]
            assert shapes == [(p.shape, p.dtype) for p in bucket.parameters()]
        bucket.set_buffer(bucket.buffer().clamp_(-1, 1))
        return default_hooks.fp16_compress_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    _steps(ddp, rank)
    return [*(torch.view_as_real(p.detach()) if p.is_complex() else p for p in ddp.parameters()), torch.tensor(seen)]


def order_in_the_log(wrap, rank, **arguments):
    ddp = wrap(_model(), **arguments)
    _steps(ddp, rank)
    order = ddp._get_ddp_logging_data()["prev_iteration_grad_ready_order_indices"]
    return [torch.tensor([int(index) for index in order.split(",")])]


def on_one_rank(wrap, rank, hooked=0, **arguments):
    ddp = wrap(_model(300).float(), **arguments)
    if rank == hooked:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return _steps(ddp, rank, 300)


def on_the_other(wrap, rank, **arguments):
    return on_one_rank(wrap, rank, hooked=1, **arguments)


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_see_torchs_buckets(world_size):
    programs = [seen_layouts, a_scale_for_each_bucket, complex_gradients]
    assert those_that_differ(programs, world_size, modes=MODES) == []


def test_where_a_kind_has_several_buckets_by_default():
    modes = {mode: MODES[mode] for mode in ("default", "static", "torch's", "unused")}
    modes["unused, small"] = {"find_unused_parameters": True, "bucket_cap_mb": 0.002}
    assert those_that_differ([above_the_first_cap, on_one_rank, on_the_other], 2, modes=modes) == []
    assert those_that_differ([order_in_the_log], 2) == []


@on_ranks(2)
def test_the_programs_own_collectives_in_backward_make_buckets_torchs(rank, world_size):
    """Of 14 MB: one of 1 MiB, and the rest."""
    counts = []
    for norm in (torch.nn.Identity, lambda: minddp.SyncBatchNorm(700)):
        layers = [layer for _ in range(7) for layer in (Linear(700, 700), norm())]
        ddp = minddp.DistributedDataParallel(Sequential(*layers))
        for _ in range(2):
            ddp(torch.ones(4, 700) * rank).sum().backward()
        counts.append(len(ddp.reducer.buckets()))
    assert counts == [4, 2]
