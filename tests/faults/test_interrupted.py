"""An exception in one rank's backward, which its program may swallow: the others learn of it before any timeout."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import run_ranks


class Boom(Exception):
    pass


@pytest.mark.parametrize("other_reducer_waits", [False, True])
@on_ranks(2)
def test_the_others_learn_of_a_swallowed_exception(rank, world_size, other_reducer_waits):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = minddp.DistributedDataParallel(net)  # one bucket, which is never complete
    second = minddp.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):
        ddp(torch.ones(1, 4)).sum().backward()
        second(torch.ones(1, 4)).sum().backward()

    def fail(grad):
        raise Boom

    if rank == 1:
        net[0].weight.register_hook(fail)
        with pytest.raises(Boom):
            ddp(torch.ones(1, 4)).sum().backward()
    else:
        waits = second if other_reducer_waits else ddp
        with pytest.raises(RuntimeError, match="rank 1 will not take part.*an exception ended its backward"):
            waits(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_failures_that_are_over_are_forgotten(rank, world_size):
    """What a rank has reported is forgotten when it goes on: a slow rank is waited for."""
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
    ddp(torch.ones(1, 4)).sum().backward()
    handle = ddp.module.bias.register_hook(lambda grad: (_ for _ in ()).throw(Boom()))
    weight = ddp.module.weight.register_hook(lambda grad: time.sleep(0.1))
    with pytest.raises(Boom):
        ddp(torch.ones(1, 4)).sum().backward()
    handle.remove()
    weight.remove()
    minddp.abort_iteration(ddp)
    ddp.zero_grad()
    if rank == 1:
        time.sleep(3)
    ddp(torch.full((1, 4), float(rank))).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((4, 4), (world_size - 1) / 2))


def _raises(grad):
    raise ValueError("in an input's hook")


@on_ranks(2, 3)
def test_a_gradient_whose_own_hook_raised_is_not_stepped_on(rank, world_size):
    """No gradient has reached the reducer: the exception came before its hook on the only one."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1, bias=False)
    ddp = minddp.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    told = []
    for step in range(3):
        optimizer.zero_grad()

        def hook(_, fails=step == 1):
            if fails:
                raise ValueError("in a user's hook")

        handle = module.weight.register_post_accumulate_grad_hook(hook)
        x = torch.randn(2, 3, requires_grad=True)
        loss = ddp(x).sum()
        try:
            loss.backward(retain_graph=True)
        except ValueError:
            told.append("caught")
            x.register_hook(_raises)  # of a backward that brings no gradient: it changes nothing
            with pytest.raises(ValueError, match="an input's hook"):
                torch.autograd.grad(loss, x)
        handle.remove()
        if told == ["caught"]:
            with pytest.raises(RuntimeError, match=r"never averaged, of \['weight'\]: an exception has ended"):
                optimizer.step()
            told.append("refused")
            optimizer.zero_grad(set_to_none=False)  # and then there is nothing to refuse
        optimizer.step()
    assert told == ["caught", "refused"] and all_alike(module.weight)


@on_ranks(2)
def test_what_an_interrupted_backward_has_not_touched_is_the_average_before(rank, world_size):
    weights = []
    for wrap in (minddp.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        ddp = wrap(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        ddp(torch.full((2, 3), float(rank))).sum().backward()
        ddp.module.register_full_backward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom()))
        with contextlib.suppress(Boom):
            ddp(torch.full((2, 3), float(rank))).sum().backward()
        optimizer.step()
        weights.append(ddp.module.weight)
    assert torch.equal(*weights) and all_alike(*weights)


@on_ranks(2)
def test_two_wrappers_after_one_exception(rank, world_size):
    """One backward through both, which an exception ends: neither has averaged the layer that they share."""
    layer = nn.Linear(4, 4)
    first, second = (minddp.DistributedDataParallel(nn.Sequential(layer)) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.full((1, 4), float(rank), requires_grad=True)
    x.register_hook(lambda grad: (_ for _ in ()).throw(Boom()))
    with pytest.raises(Boom):
        (first(x) + second(x)).sum().backward()
    with pytest.raises(RuntimeError, match="never averaged|Expected to have finished reduction"):
        optimizer.step()
    assert layer.bias.grad is not None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrap", [torch.nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel])
@on_ranks(2)
def test_a_step_without_gradients_is_nobodys_mistake(rank, world_size, wrap, set_to_none):
    """The next forward tells of the exception, as with torch's class; a step that changes nothing need not.

    An exception that every rank catches; the gradients are zeroed, and a step finds none.
    """
    torch.manual_seed(0)
    ddp = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = ddp.module[0].weight.detach().clone()
    handle = ddp.module[0].weight.register_hook(lambda grad: (_ for _ in ()).throw(Boom()))
    with pytest.raises(Boom):
        ddp(torch.ones(1, 4)).sum().backward()
    handle.remove()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert torch.equal(ddp.module[0].weight, before)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(torch.ones(1, 4))


class _Raises(torch.optim.SGD):
    """Its step raises where it is told to: before anything has changed, after one parameter, or after all."""

    fails = ""

    def step(self, closure=None):
        if self.fails == "before":
            raise Boom
        parameters = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = parameters[: 1 if self.fails == "between" else None]
        loss = super().step(closure)
        self.param_groups[0]["params"] = parameters
        if self.fails:
            raise Boom
        return loss


def _step_raises(rank, world_size, wrap, who, how):
    """Four iterations; in the second the steps of some ranks raise, and their programs go on."""
    torch.manual_seed(0)
    ddp = wrap(nn.Linear(4, 1))
    optimizer = _Raises(ddp.parameters(), 0.1)
    for i in range(4):
        optimizer.fails = how if i == 1 and rank in who and how != "closure" else ""

        def closure(fails=i == 1 and rank in who and how == "closure"):
            if fails:
                raise Boom
            optimizer.zero_grad()
            loss = ddp(torch.full((1, 4), float(rank + i))).sum()
            loss.backward()
            return loss

        with contextlib.suppress(Boom):
            if how == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return ddp.module.weight.detach().clone()


@pytest.mark.parametrize("how", ["before", "closure", "after"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_that_raise_and_leave_all_ranks_alike(world_size, how):
    """Training goes on, as with torch's class: no rank has changed anything, or rank 1 all that it had to."""
    ranks = [1] if how == "after" else range(world_size)
    theirs = run_ranks(_step_raises, world_size, torch.nn.parallel.DistributedDataParallel, ranks, how)
    ours = run_ranks(_step_raises, world_size, minddp.DistributedDataParallel, ranks, how)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)


@on_ranks(2)
def test_a_compiled_step_is_none_that_raised(rank, world_size):
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(3):
        optimizer.zero_grad()
        ddp(torch.full((1, 4), float(rank + i))).sum().backward()
        step()

    def closure():
        optimizer.zero_grad()
        loss = ddp(torch.full((1, 4), float(rank))).sum()
        loss.backward()
        return loss

    step(closure)
    assert all_alike(ddp.module.weight)


def _begun_anew(rank, world_size, path):
    """Rank 1 leaves an iteration out; all catch what follows, and train on in another group with another wrapper."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ddp = minddp.DistributedDataParallel(net)
    ddp(torch.ones(1, 4)).sum().backward()
    with pytest.raises((RuntimeError, ValueError)):
        loss = ddp(torch.ones(1, 4)).sum()
        if rank == 1:
            raise ValueError("a bad sample")
        loss.backward()
    loss = None
    del ddp
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    net.zero_grad()
    ddp = minddp.DistributedDataParallel(net)
    for _ in range(3):
        ddp(torch.full((1, 4), 1.0 + rank)).sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    del ddp
    dist.destroy_process_group()
    return grads


def test_a_wrapper_that_was_given_up_does_not_meet_the_next(tmp_path):
    """Among three ranks the two that are left stay connected, and what they have sent is never over."""
    first, *others = run_ranks(_begun_anew, 3, str(tmp_path / "second"))
    assert all(all(map(torch.equal, first, grads)) for grads in others)
    assert torch.equal(first[3], torch.full((2,), 3.0))  # of three steps that were averaged
