"""delay_all_reduce_named_params: what is delayed trains as what is not, or an error says why it cannot."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import minddp
from minddp import DistributedDataParallel as DDP
from tests.on_ranks import on_ranks

DELAYED = ("head.weight", "head.bias")
EVERY = ("first.weight", "first.bias", "side.weight", "side.bias", "head.weight", "head.bias")


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, side=True):
        h = self.first(x).tanh()
        return self.head(h + self.side(h) if side else h)


def _wrapped(module=None, delayed=DELAYED, trigger="first.weight", **arguments):
    module = Branch() if module is None else module
    named = dict(module.named_parameters())
    return DDP(
        module,
        delay_all_reduce_named_params=[(name, named[name]) for name in delayed],
        param_to_hook_all_reduce=named[trigger],
        **arguments,
    )


def _loss(ddp, rank, step, **arguments):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return ddp(torch.randn(3, 4, generator=generator), **arguments).pow(2).mean()


def _train(ddp, rank, steps, accumulates=False):
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        if accumulates:
            with ddp.no_sync():
                _loss(ddp, rank, step + 10).backward()
        _loss(ddp, rank, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.module.parameters()]


@on_ranks(2, 3)
def test_it_trains_as_what_is_not_delayed_and_so_do_copies(rank, world_size):
    plain = _train(DDP(Branch()), rank, 4)
    for delayed, kept in ((DELAYED, {"first.weight", "first.bias", "side.weight", "side.bias"}), (EVERY, set())):
        for how in (lambda ddp: ddp, copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
            ddp = how(_wrapped(delayed=delayed))
            torch.testing.assert_close(_train(ddp, rank, 4), plain)
            assert {ddp.reducer.names[index] for bucket in ddp.reducer.buckets() for index in bucket} == kept


@pytest.mark.parametrize("accumulates", [False, True])
@on_ranks(2, 3)
def test_uneven_inputs(rank, world_size, accumulates):
    """Under no_sync what is delayed is averaged all the same: a joined rank sends the average with the next."""
    for initial in (True, False):
        trained = []
        for wrap in (lambda: DDP(Branch()), _wrapped, lambda: _wrapped(delayed=EVERY)):
            ddp = wrap()
            with ddp.join(divide_by_initial_world_size=initial):
                _train(ddp, rank, 2 + 2 * rank, accumulates)
            trained.append([p.detach().clone() for p in ddp.module.parameters()])
        torch.testing.assert_close(trained[1], trained[0])
        torch.testing.assert_close(trained[2], trained[0])
        _train(ddp, rank, 2)  # and no rank waits after it


@on_ranks(2)
def test_delayed_gradients_that_have_changed_places(rank, world_size):
    """As without delays, whoever's window a gradient lies in."""
    seen = []
    for wrap in (lambda net: DDP(net), lambda net: _wrapped(net, delayed=("head.weight", "side.weight"))):
        net, grads = Branch(), []
        net.head = nn.Linear(6, 6)
        nn.init.constant_(net.head.weight, 0.1)
        nn.init.zeros_(net.head.bias)
        ddp = wrap(net)
        for step in range(4):
            _loss(ddp, rank, step).backward()
            net.head.weight.grad, net.side.weight.grad = net.side.weight.grad, net.head.weight.grad
            grads += [p.grad.clone() for p in net.parameters()]
        seen.append(grads)
    torch.testing.assert_close(seen[1], seen[0])


@on_ranks(2)
def test_delays_beside_other_wrappers_tied_and_frozen_parameters(rank, world_size):
    """A second wrapper around what another delays, a tied parameter by its second name, a frozen one."""
    module = Branch()
    delaying = _wrapped(module)
    DDP(module)
    del delaying

    tied = Branch()
    tied.other = nn.Linear(6, 6, bias=False)
    tied.other.weight = tied.side.weight
    named = dict(tied.named_parameters(remove_duplicate=False))
    ddp = DDP(
        tied,
        delay_all_reduce_named_params=[("other.weight", named["other.weight"])],
        param_to_hook_all_reduce=named["first.weight"],
    )
    torch.testing.assert_close(_train(ddp, rank, 3), _train(DDP(Branch()), rank, 3))

    frozen, plain = Branch(), Branch()
    for net in (frozen, plain):
        net.head.bias.requires_grad_(False)
    torch.testing.assert_close(_train(_wrapped(frozen), rank, 3), _train(DDP(plain), rank, 3))


@on_ranks(2)
def test_a_trigger_whose_gradient_comes_first_is_refused(rank, world_size):
    ddp = _wrapped(delayed=("first.weight", "first.bias"), trigger="head.weight")
    with pytest.raises(RuntimeError, match="'first.bias'.*after that of 'head.weight'.*an earlier layer"):
        _loss(ddp, rank, 0).backward()


@on_ranks(2)
def test_what_does_not_go_together_is_refused(rank, world_size):
    for arguments in ({"reduction": "sum"}, {"reduction": "weighted"}, {"check_finite": True}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.* delay_all_reduce_named_params"):
            _wrapped(**arguments)
    module = Branch()
    ddp = DDP(
        module,
        delay_all_reduce_named_params=[("head.bias", module.head.bias)],
        param_to_hook_all_reduce=nn.Parameter(torch.zeros(1)),
    )
    with pytest.raises(RuntimeError, match="param_to_hook_all_reduce is not a parameter of its module"):
        copy.deepcopy(ddp)


@on_ranks(2)
def test_nothing_is_reduced_after_the_wrappers_end(rank, world_size):
    """Its hooks stay on the parameters: without the wrapper they do nothing, and another may take its place."""
    module = Branch()
    ddp = _wrapped(module)
    _loss(ddp, rank, 0).backward()
    del ddp
    gc.collect()
    module.zero_grad()
    if rank == 0:
        _loss(module, rank, 0).backward()  # nobody waits for another rank
    module.zero_grad()
    plain = DDP(Branch())
    torch.testing.assert_close(_train(_wrapped(module), rank, 2), _train(plain, rank, 2))


@on_ranks(2)
def test_replicas_are_compared_with_what_is_delayed(rank, world_size):
    ddp = _wrapped()
    minddp.check_replicas(ddp)
    with torch.no_grad():
        ddp.module.head.bias += rank
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        minddp.check_replicas(ddp)
    minddp.repair_replicas(ddp, 0)
    minddp.check_replicas(ddp)
