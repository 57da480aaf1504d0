"""A program that runs backward() in threads of its own: one iteration, ended by the last of them."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.ranks_pool import RankError, run_ranks

STEPS = 40


class TwoHeads(nn.Module):
    """Two losses that share no parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2)) for _ in range(2)
        )

    def forward(self, x):
        return [head(x) for head in self.heads]


def _side_by_side(losses):
    errors = []

    def backward(loss):
        try:
            loss.backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=backward, args=[loss]) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _the_first_ends_first(losses):
    """The first one goes on when both have begun; the second one goes on when the first has ended."""
    both_have_begun, first_has_ended = threading.Event(), threading.Event()
    first, second = (loss.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[1][0] for loss in losses)
    first.register_prehook(lambda grads: _wait(both_have_begun))
    second.register_prehook(lambda grads: (both_have_begun.set(), _wait(first_has_ended))[1])
    thread = threading.Thread(target=losses[1].backward)
    thread.start()
    losses[0].backward()
    first_has_ended.set()
    thread.join()


def _wait(event):
    assert event.wait(250)


def _train(rank, world_size, wrap, arguments, local=False, together=_side_by_side):
    ddp = wrap(TwoHeads(), **arguments)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
        if local:
            with ddp.no_sync():
                together([output.square().mean() for output in ddp(x)])
        together([output.square().mean() for output in ddp(x)])
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def _check(ours, theirs):
    for weights in ours:
        for mine, first, other in zip(weights, ours[0], theirs[0]):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb_list": [1e-4] * 2}]
TOGETHER = [
    *((world_size, options, False, _side_by_side) for world_size in (2, 3) for options in OPTIONS),
    *((2, options, False, _the_first_ends_first) for options in ({}, {"static_graph": True})),
    (2, {}, True, _side_by_side),
]


@pytest.mark.parametrize(("world_size", "arguments", "local", "together"), TOGETHER)
def test_backwards_side_by_side_train_as_with_torch(world_size, arguments, local, together):
    """The last of them ends the iteration; local ones are accumulated."""
    theirs = run_ranks(_train, world_size, TorchDDP, {} if "static_graph" in arguments else arguments, local)
    ours = run_ranks(_train, world_size, minddp.DistributedDataParallel, arguments, local, together)
    _check(ours, theirs)


def test_with_unused_parameters_a_side_by_side_backward_is_right_or_told():
    """The first of them says what is unused. Torch's class raises, too. Where one rank's threads came one after the
    other, it has one iteration more than the others, and Gloo ends a process that gets more than it expects."""
    told = []
    try:
        weights = run_ranks(_train, 2, minddp.DistributedDataParallel, {"find_unused_parameters": True})
    except RankError as error:
        weights, told = [[], []], list(error.failures.values())
    assert all(map(torch.equal, *weights))
    assert all(any(end in text for end in ("RuntimeError", "LostPeer", "exit code -6")) for text in told), told
