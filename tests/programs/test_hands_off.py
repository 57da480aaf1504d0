"""Where nothing can go wrong among ranks nothing is refused: one rank alone, no group any more, a forked child."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

import minddp
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import batch, mlp, weights
from tests.ranks_pool import run_ranks

BOTH = torch.nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel


def _steps(ddp, optimizer, rank=0, dtype=torch.float32):
    for step in range(2):
        ddp(batch(rank, step).to(dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp


# --- one rank


def steps_in_backward(wrap):
    ddp = wrap(mlp())
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in ddp.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        ddp(batch(0, number)).sum().backward()
    return ddp


def parameters_assigned(wrap):
    ddp = wrap(mlp())
    _steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1))
    ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()}, assign=True)
    return _steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1))


def cast(wrap):
    ddp = wrap(mlp())
    ddp.double()
    return _steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), dtype=torch.float64)


def two_backwards_of_one_graph(wrap):
    ddp = wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(2):
        loss = ddp(batch(0, step)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp


def past_the_wrapper(wrap):
    ddp = wrap(mlp())
    _steps(ddp.module, torch.optim.SGD(ddp.parameters(), 0.1))
    return ddp


def exception_in_step(wrap):
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise ValueError

    ddp = wrap(mlp())
    optimizer = Raises(ddp.parameters(), 0.1)
    for step in range(2):
        ddp(batch(0, step)).sum().backward()
        with pytest.raises(ValueError):
            optimizer.step()
        optimizer.zero_grad()
    return ddp


ALONE = (
    steps_in_backward, parameters_assigned, cast, two_backwards_of_one_graph, past_the_wrapper, exception_in_step,
)  # fmt: skip


@pytest.mark.parametrize("program", ALONE)
@on_ranks(1)
def test_one_rank_alone(rank, world_size, program):
    theirs, ours = [list(program(wrap).parameters()) for wrap in BOTH]
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


@on_ranks(1)
def test_two_wrappers_of_one_parameter_on_one_rank(rank, world_size):
    """Torch's class refuses it. On several ranks so does ours: one of the two would send the other's sum."""
    net = mlp()
    first, second = [minddp.DistributedDataParallel(net, gradient_as_bucket_view=True) for _ in range(2)]
    (first(batch(0, 0)).sum() + second(batch(0, 1)).sum()).backward()
    mine = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    (net(batch(0, 0)).sum() + net(batch(0, 1)).sum()).backward()
    assert all(torch.allclose(a, p.grad) for a, p in zip(mine, net.parameters()))


# --- two ranks


class Unhashable(torch.optim.SGD):
    __hash__ = None

    def __eq__(self, other):
        return self is other


def unhashable_optimizer(wrap, rank):
    ddp = wrap(mlp())
    return _steps(ddp, Unhashable(ddp.parameters(), 0.1), rank)


def forked_child(wrap, rank):
    """It trains its copy by itself: an evaluation that adapts, say."""
    ddp = wrap(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    _steps(ddp, optimizer, rank)
    child = os.fork()
    if child == 0:
        try:
            _steps(ddp.module, optimizer, rank)
        finally:
            os._exit(bool(sys.exc_info()[0]))
    assert os.waitpid(child, 0)[1] == 0
    return ddp


_kept = []


def after_the_group(wrap, rank):
    ddp = wrap(mlp())
    _kept.append(ddp)  # torch's holds the group, whose end waits, under the GIL, for a thread that wants the GIL
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    _steps(ddp, optimizer, rank)
    dist.destroy_process_group()
    _steps(ddp.module, optimizer)
    return ddp


def _beside(rank, world_size, program, wrap):
    return weights(program(wrap, rank))


@pytest.mark.parametrize("program", [unhashable_optimizer, forked_child, after_the_group])
def test_two_ranks(program):
    theirs, ours = [run_ranks(_beside, 2, program, wrap) for wrap in BOTH]
    for one, other in zip(theirs, ours, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)
