"""Several wrappers, or other collectives, in one backward, where each rank's graph is another. With torch's class all
ranks' collectives have one order, since buckets leave when their gradients have come; so they must here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minddp.guards import times
from tests.programs.beside_torch import MODES, SummedInBackward, those_that_differ

STEPS = 3


def _net(width):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def _batch(rank, i, width=8):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * i + rank))


def _train(ddps, rank, loss, width=8):
    seen = []
    for i in range(STEPS):
        for ddp in ddps:
            ddp.zero_grad()
        loss(_batch(rank, i, width), i).backward()
        seen += [p.grad.clone() for ddp in ddps for p in ddp.module.parameters()]
    return seen


def _cycle(cls, rank, width=8, groups=False, **args):
    torch.manual_seed(0)
    one, two = (cls(_net(w), process_group=dist.new_group() if groups else None, **args) for w in (8, width))

    def loss(x, i):
        there = one(x)
        back = two(there)
        again = one(two(x)) if rank == 0 or i % 2 else 0 * there
        return (back - x).square().mean() + (again - x).square().mean()

    return _train([one, two], rank, loss)


def a_term_of_one_rank(cls, rank, **args):
    """Of modules of one shape: what is added up by mistake has the right size."""
    return _cycle(cls, rank, **args)


def a_term_of_one_rank_of_other_shapes(cls, rank, **args):
    return _cycle(cls, rank, width=16, **args)


def a_term_of_one_rank_in_groups(cls, rank, **args):
    return _cycle(cls, rank, groups=True, **args)


def a_collective_above_the_wrapper(cls, rank, **args):
    """In backward; a rank whose layers above are frozen joins in when its backward is over."""
    torch.manual_seed(0)
    above, ddp = nn.Linear(8, 8), cls(_net(8), **args)
    above.requires_grad_(rank == 0)
    seen = []
    for i in range(STEPS):
        ddp.zero_grad()
        ddp(SummedInBackward.apply(above(_batch(rank, i)))).square().mean().backward()
        if rank:
            dist.all_reduce(torch.zeros(4, 8))
        seen += [p.grad.clone() for p in ddp.module.parameters()]
    return seen


class _Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(128, 1024), nn.Linear(512, 1024)])  # 0.5 and 2 MiB

    def forward(self, x, which):
        return self.parts[which](x[:, : 512 if which else 128])


def a_wrapper_between(cls, rank, **args):
    """``a(b(a(x)))``, of which each rank uses another part first: b's bucket is between a's."""
    torch.manual_seed(0)
    a, b = cls(_Halves(), **args), cls(nn.Linear(1024, 512), **args)
    first = int(rank == 0)
    return _train([a, b], rank, lambda x, i: a(b(a(x, first).tanh()).tanh(), 1 - first).square().mean(), 512)


class _Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))  # 1.4 MiB each

    def forward(self, x, adapter, depth):
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            x = x + adapter(x) if i == depth else x
        return x


def an_adapter_at_a_depth_that_is_drawn(cls, rank, **args):
    torch.manual_seed(0)
    trunk, adapter = cls(_Trunk(), **args), cls(nn.Linear(600, 600), **args)
    return _train([trunk, adapter], rank, lambda x, i: trunk(x, adapter, (i + 2 * rank) % 3).square().mean(), 600)


@times.faster(0.2)
def zeros_in_place_of_a_loss(cls, rank, **args):
    """One rank has nothing to learn from: a backward past the second wrapper, in its iteration."""
    torch.manual_seed(0)
    one, two = cls(_net(8), **args), cls(_net(8), **args)

    def loss(x, i):
        features = one(x)
        loss = two(features).square().mean()
        nothing = sum(p.sum() for p in two.module.parameters())
        return loss if rank == 0 or i != 1 else 0 * features.sum() + 0 * nothing

    return _train([one, two], rank, loss)


class _Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1024))  # 1 and 2 MiB
        self.head = nn.Linear(1024, 128)

    def forward(self, x, uses_head):
        x = self.trunk(x).tanh()
        return self.head(x) if uses_head else x[:, :128]


def a_collective_before_rank_0s_first_gradient(cls, rank, **args):
    """And after rank 1's, whose head is in a term times zero alone."""
    torch.manual_seed(0)
    ddp = cls(_Headed(), **args)

    def loss(x, i):
        out = SummedInBackward.apply(ddp(x, rank == 0))
        return out.square().mean() + 0 * sum(p.sum() for p in ddp.module.parameters())

    return _train([ddp], rank, loss, 512)


PROGRAMS = [
    a_term_of_one_rank,
    a_term_of_one_rank_of_other_shapes,
    a_term_of_one_rank_in_groups,
    a_collective_above_the_wrapper,
    a_wrapper_between,
    an_adapter_at_a_depth_that_is_drawn,
    a_collective_before_rank_0s_first_gradient,
]


@pytest.mark.parametrize("mode", ["default", "find_unused", pytest.param("views", marks=pytest.mark.all)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_have_torchs_order(world_size, mode):
    # Torch's class looks for unused parameters in the last forward's outputs alone, and raises in two of them.
    raising = [a_wrapper_between, a_collective_before_rank_0s_first_gradient] if mode == "find_unused" else []
    programs = [f for f in PROGRAMS if f not in raising]
    assert not those_that_differ(programs, world_size, {mode: MODES[mode]})


def test_a_backward_past_a_wrapper_sends_in_its_place():
    modes = {mode: MODES[mode] for mode in ("default", "find_unused")}
    assert not those_that_differ([zeros_in_place_of_a_loss], 2, modes)
