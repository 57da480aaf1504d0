"""Outputs that a loss leaves out, with unused parameters to find: what lies behind them is visited all the same.

The same numbers as with torch's class.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import MODES, batch, other_collective, those_that_differ, trained

Found = namedtuple("Found", "first second")


def centred(x):
    """What SyncBatchNorm does: a collective in forward, another one in backward."""
    return x - other_collective(x.mean(0)) / dist.get_world_size()


class Heads(nn.Module):
    """Two outputs. ``pack``: what they come in."""

    def __init__(self, pack=Found, normal=centred):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.one, self.two = (nn.Linear(4, 4) for _ in range(4))
        self.pack, self.normal = pack, normal

    def forward(self, x):
        h = self.body(x).tanh()
        return self.pack(self.one(self.normal(self.a(h))), self.two(h))


def a_head_with_collectives_left_out_on_one_rank(cls, rank, **args):
    def loss(i, out):
        return out.second.square().sum() + (out.first.square().sum() if (i + rank) % 2 else 0)

    return trained(cls(Heads(), **args), rank, 4, loss)


def left_out_on_all_ranks(cls, rank, **args):
    net = Heads(lambda *out: OrderedDict(a=[out[0]], b=out[1]))
    return trained(cls(net, **args), rank, 4, lambda i, out: out["b"].sum())


def how_often_hooks_run(cls, rank, **args):
    ddp = cls(Heads(), **args)
    calls = torch.zeros(4)
    for i, layer in enumerate((ddp.module.body, ddp.module.a, ddp.module.one, ddp.module.two)):
        node = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
        layer.keeps = node
    return [*trained(ddp, rank, 4, lambda i, out: out.second.square().sum()), calls]


def an_output_changed_in_place_that_the_module_keeps(cls, rank, **args):
    class Keeps(Heads):
        last = 0.0

        def forward(self, x):
            out = super().forward(x)
            out = Found(out.first + self.last, out.second)
            self.last = out.first.detach()
            return out

    def loss(i, out):
        out.first.add_(1.0)
        return (out.first * out.second).sum()

    return trained(cls(Keeps(), **args), rank, 4, loss)


PROGRAMS = [
    a_head_with_collectives_left_out_on_one_rank, left_out_on_all_ranks, how_often_hooks_run,
    an_output_changed_in_place_that_the_module_keeps,
]  # fmt: skip
FINDS = {"find_unused": MODES["find_unused"], "views": {**MODES["find_unused"], "gradient_as_bucket_view": True}}


def test_the_numbers_are_torchs():
    assert not those_that_differ(PROGRAMS, 2, FINDS)


@on_ranks(2)
def test_functional_transforms(rank, world_size):
    """Functional transforms and forward-mode derivatives go through the wrapper."""
    ddp = minddp.DistributedDataParallel(Heads(normal=nn.Identity()), find_unused_parameters=True)
    x = batch(rank)
    for net in (ddp, ddp.module):
        net.tangent = torch.func.jvp(lambda x, net=net: net(x).second, (x,), (torch.ones_like(x),))[1]
        net.gradient = torch.func.grad(lambda x, net=net: net(x).second.square().sum())(x)
        net.each = torch.func.vmap(torch.func.grad(lambda x, net=net: net(x).second.square().sum()))(x)
    assert all(torch.allclose(getattr(ddp, n), getattr(ddp.module, n)) for n in ("tangent", "gradient", "each"))


class Many(nn.Module):
    """Small outputs by the thousand, as detection heads return them."""

    def __init__(self, n):
        super().__init__()
        self.layer = nn.Linear(4, n)

    def forward(self, x):
        return [(t, t * 2, [t * 3]) for t in self.layer(x).mean(0).unbind()]


def nodes_of(outputs):
    """The number of nodes in the graph of a loss of all of these outputs."""
    ahead = [torch.stack([a + b[0] for a, _, b in outputs] + [c for _, c, _ in outputs]).grad_fn]
    seen = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize("finds_unused", [True, False])
@on_ranks(1)
def test_one_node_joins_all_outputs(rank, world_size, finds_unused):
    """What a backward through many outputs takes, ``benchmarks/outputs.py`` measures."""
    ddp = minddp.DistributedDataParallel(Many(2000), find_unused_parameters=finds_unused)
    assert nodes_of(ddp(torch.ones(2, 4))) == nodes_of(ddp.module(torch.ones(2, 4))) + finds_unused
