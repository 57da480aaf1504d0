"""A gradient is taken when it arrives, in every iteration: what is done to `.grad` after that changes nothing.

And of a gradient that a hook takes from `.grad` before, a static graph knows that autograd made it.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minddp
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import batch, gradients, mlp

MODES = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "small": {"bucket_cap_mb_list": [1e-5] * 2},
}
ITERATIONS = 4


def leave(p):
    pass


def clear(p):
    p.grad = None


def scale(p):
    if p.grad is not None:
        p.grad.mul_(3.0)


def replace(p):
    if p.grad is not None:
        p.grad = p.grad * 3.0


def halve(p):
    p.grad.mul_(0.5)


CHANGES = (leave, clear, scale, replace)


def by_a_hook(wrap, rank, kwargs, change):
    """The first layer's hook changes the last one's gradient."""
    module = mlp()
    ddp, seen = wrap(module, **kwargs), []
    module[0].weight.register_post_accumulate_grad_hook(lambda _: change(module[2].weight))
    for i in range(ITERATIONS):
        module.zero_grad()
        ddp(batch(rank, i)).pow(2).sum().backward()
        seen.append(gradients(module))
    return seen


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


def between_backwards(wrap, rank, kwargs, change):
    module, seen = Two(), []
    ddp = wrap(module, **kwargs)
    for i in range(ITERATIONS):
        module.zero_grad()
        a, b = ddp(batch(rank, i))
        b.pow(2).sum().backward()
        for parameter in module.b.parameters():
            change(parameter)
        a.pow(2).sum().backward()
        seen.append(gradients(module))
    return seen


def same(ours, theirs):
    return all((a is None and b is None) or torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@on_ranks(2)
def test_the_same_as_with_torchs_class_from_the_first_iteration_on(rank, world_size):
    warnings.simplefilter("ignore")
    found = []
    for program, modes in ((by_a_hook, ("default", "views", "unused")), (between_backwards, ("default", "views"))):
        for mode in modes:
            for small in ({}, {"bucket_cap_mb_list": [1e-4] * 2}):
                # With views torch's class raises where one is replaced; and what is scaled may be on its way already.
                for change in CHANGES if mode != "views" else CHANGES[: 2 if small else 3]:
                    kwargs = {**MODES[mode], **small}
                    theirs, ours = (program(wrap, rank, kwargs, change) for wrap in CLASSES)
                    wrong = [i for i in range(ITERATIONS) if not same(ours[i], theirs[i])]
                    if wrong:
                        found.append((program.__name__, change.__name__, mode, bool(small), wrong))
    # Torch's class takes a static graph's first gradients at the end of backward, the later ones as they come.
    for change in (scale, replace):
        kwargs = MODES["static"]
        theirs, ours = (by_a_hook(wrap, rank, kwargs, change) for wrap in CLASSES)
        plain = by_a_hook(TorchDDP, rank, {}, change)
        if not all(map(same, ours[1:], theirs[1:])) or not same(ours[0], plain[0]):
            found.append(("static", change.__name__))
    assert not found


CLASSES = (TorchDDP, minddp.DistributedDataParallel)


# --- gradients that come several times


class Repeated(nn.Module):
    """Its layers' gradients come twice in each backward, from reentrant checkpoints."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda x: self.last(self.layer(x)).tanh(), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("small", [{}, {"bucket_cap_mb_list": [1e-5] * 2}])
@pytest.mark.parametrize("mode", ["default", "views", "static", "static_views"])
@on_ranks(2)
def test_what_comes_again_in_the_first_iteration_is_taken_again(rank, world_size, mode, small):
    """Against the mean of the ranks' own gradients, with what the last layer's own hook makes of them."""
    warnings.simplefilter("ignore")
    module, found = Repeated(), []
    ddp = minddp.DistributedDataParallel(module, **MODES[mode], **small)
    own = Repeated()
    for one in (module, own):
        one.last.weight.register_post_accumulate_grad_hook(halve)
    for i in range(ITERATIONS):
        for one in (ddp, own):
            one.zero_grad()
            one(batch(rank, i).requires_grad_()).pow(2).sum().backward()
        for ours, mine in zip(module.parameters(), own.parameters()):
            mean = mine.grad.clone()
            torch.distributed.all_reduce(mean)
            found.append(torch.allclose(ours.grad, mean / world_size, atol=1e-6))
    assert all(found)


# --- gradients that a hook takes away


def main_grad(wrap, rank, kwargs, moves):
    """As Megatron: gradients are added up in another place, and `.grad` is dropped, where ``moves(name, i)``."""
    module, seen, now = mlp(), [], [0]
    for name, parameter in module.named_parameters():
        parameter.main_grad = torch.zeros_like(parameter)

        def move(p, name=name):
            if moves(name, now[0]):
                p.main_grad.add_(p.grad)
                p.grad = None

        parameter.register_post_accumulate_grad_hook(move)
    ddp = wrap(module, **kwargs)
    for i in range(ITERATIONS):
        now[0] = i
        if i != 1:  # in which they are added to
            module.zero_grad()
        ddp(batch(rank, i)).pow(2).sum().backward()
        seen.append([*gradients(module), *(p.main_grad.clone() for p in module.parameters())])
    return seen


def main_grad_at_the_node(wrap, rank, kwargs, moves):
    """The same with a hook on AccumulateGrad, which was there before the wrapper."""
    module, seen, nodes = mlp(), [], []
    for parameter in module.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, p=parameter: clear(p))
        nodes.append(node)
    ddp = wrap(module, **kwargs)
    for i in range(ITERATIONS):
        ddp(batch(rank, i)).pow(2).sum().backward()
        seen.append(gradients(module))
    return seen


MOVES = {
    "all": lambda name, i: True,
    "one": lambda name, i: name == "0.weight",
    "from the third on": lambda name, i: i >= 2,
}


@on_ranks(2)
def test_a_gradient_that_a_hook_moves_is_no_change_of_the_graph(rank, world_size):
    warnings.simplefilter("ignore")
    found = []
    for mode, kwargs in MODES.items():
        for name, moves in MOVES.items():
            theirs, ours = (main_grad(wrap, rank, kwargs, moves) for wrap in CLASSES)
            if not all(map(same, ours, theirs)):
                found.append((mode, name))
        theirs, ours = (main_grad_at_the_node(wrap, rank, kwargs, None) for wrap in CLASSES)
        if not all(map(same, ours, theirs)):
            found.append((mode, "at the node"))
    # Torch's class leaves these local.
    stops = main_grad(TorchDDP, rank, {}, lambda name, i: i < 2)
    ours = main_grad(minddp.DistributedDataParallel, rank, MODES["static"], lambda name, i: i < 2)
    if not all(map(same, ours[2:], stops[2:])):
        found.append(("static", "stops"))
    assert not found


@on_ranks(2)
def test_a_moved_gradient_that_was_not_there_at_first_raises(rank, world_size):
    """The promise is broken where autograd made nothing before, whatever a hook makes of it now."""
    module = Two()
    for parameter in module.b.parameters():
        parameter.register_post_accumulate_grad_hook(clear)
    ddp = minddp.DistributedDataParallel(module, static_graph=True)
    ddp(batch(rank, 0))[0].sum().backward()
    a, b = ddp(batch(rank, 1))
    with pytest.raises(RuntimeError, match=r"training graph has changed.*'b\."):
        (a.sum() + b.sum()).backward()
