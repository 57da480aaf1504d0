"""Backwards of distributed autograd (RPC): gradients go to a context and not to `.grad`. Beside torch's class."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.utils.checkpoint import checkpoint

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.programs.beside_torch import batch, differ, mlp
from tests.programs.test_same_program import Quantized
from tests.ranks_pool import free_port

pytestmark = pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC")


class Branches(nn.Module):
    """A head for even ranks, one for odd ones, one for nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def forward(self, x, which):
        return self.heads[which](self.body(x))


def of_context(context, *modules):
    """The context's gradients, None where it has none, and what lies in `.grad`."""
    gradients = dist_autograd.get_gradients(context)
    found = []
    for p in (p for module in modules for p in module.parameters()):
        found.append(gradients[p].clone() if p in gradients else None)
        found.append(None if p.grad is None else p.grad.clone())
    return found


def reduced(loss, *modules):
    """The same after a backward of ``loss()`` in a context of its own."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss()])
        return of_context(context, *modules)


MODES = {
    "default": {},
    "small": {"bucket_cap_mb_list": [1e-5] * 2},
    "find_unused": {"find_unused_parameters": True, "bucket_cap_mb_list": [1e-5] * 2},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb_list": [1e-5] * 2},
}


def several_steps(wrap, rank):
    """Each in a context of its own; what plain backwards have left in `.grad` stays as it is."""
    model, seen = wrap(mlp()), []
    model(batch(rank, 9)).sum().backward()
    for i in range(3):
        seen += reduced(lambda i=i: model(batch(rank, i)).pow(2).sum(), model)
    model(batch(rank, 10)).sum().backward()
    return seen + [p.grad.clone() for p in model.parameters()]


def plain_backward_in_a_context(wrap, rank):
    """Where a context is merely open gradients go to `.grad`, as ever."""
    model = wrap(mlp())
    for i in range(2):
        with dist_autograd.context() as context:
            model(batch(rank, i)).sum().backward()
            seen = of_context(context, model)
    return seen


def accumulated_in_one_context(wrap, rank):
    model, seen = wrap(mlp()), []
    for i in range(2):
        with dist_autograd.context() as context:
            with model.no_sync():
                out = model(batch(rank, i))
            dist_autograd.backward(context, [out.sum()])
            dist_autograd.backward(context, [model(batch(rank, i + 5)).sum()])
            seen += of_context(context, model)
    return seen


def with_a_remote_part(wrap, rank):
    """The graph goes through the next rank's process, as in a pipeline or behind a parameter server."""
    model, seen = wrap(mlp()), []
    peer = f"rank{(rank + 1) % dist.get_world_size()}"
    for i in range(3):
        with dist_autograd.context() as context:
            far = rpc.rpc_sync(peer, torch.mul, args=(model(batch(rank, i)), 3.0))
            dist_autograd.backward(context, [far.pow(2).sum()])
            seen += of_context(context, model)
            dist.barrier()
    return seen


def stepped_by_a_distributed_optimizer(wrap, rank):
    model = wrap(mlp())
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.parameters()], lr=0.1)
    for i in range(3):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(batch(rank, i)).pow(2).sum()])
            optimizer.step(context)
    return [p.detach().clone() for p in model.parameters()]


class Referring(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return rpc.RRef(self.inner(x))


def outputs_behind_a_reference(wrap, rank):
    model = wrap(Referring())
    for i in range(3):
        seen = reduced(lambda i=i: model(batch(rank, i)).local_value().sum(), model)
    return seen


def raised(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError:
        return torch.tensor(1.0)
    return torch.tensor(0.0)


def a_hook_of_the_users_raises(wrap, rank):
    """On all ranks, in a context; then the program goes on with another wrapper, and plain gradients."""
    model = mlp()
    ddp = wrap(model)
    with ddp.no_sync():
        ddp(batch(rank, 3)).sum().backward()
    before = [p.grad for p in model.parameters()]

    def fail(_):
        raise RuntimeError("the user's")

    handle = model[0].bias.register_hook(fail)
    with dist_autograd.context() as context:
        out = ddp(batch(rank)).sum()
        seen = [raised(dist_autograd.backward, context, [out])]
    handle.remove()
    same = [torch.tensor(float(p.grad is grad)) for p, grad in zip(model.parameters(), before, strict=True)]
    del ddp, out
    again = wrap(model)
    again(batch(rank, 4)).sum().backward()
    return seen + same + [p.grad.clone() for p in model.parameters()]


def a_comm_hook_raises(wrap, rank):
    """In the first iteration: at the end of backward. Cleared gradients stay cleared."""
    model = wrap(mlp())

    def fail(state, bucket):
        raise RuntimeError("the user's")

    model.register_comm_hook(None, fail)
    model.module(batch(rank, 1)).sum().backward()
    with dist_autograd.context() as context:
        out = model(batch(rank)).sum()
        seen = [raised(dist_autograd.backward, context, [out])]
    model.zero_grad()
    if isinstance(model, minddp.DistributedDataParallel):
        minddp.abort_iteration(model)
    return [*seen, *(p.grad for p in model.parameters())]


def looked_at_and_cleared(wrap, rank):
    """`.grad` is the program's while such a backward runs."""
    model, seen = mlp(), []
    ddp = wrap(model)
    ddp(batch(rank, 1)).sum().backward()

    def look(gradient):
        seen.append(model[2].weight.grad.clone())
        model[2].weight.grad = None

    handle = model[0].weight.register_hook(look)
    seen += reduced(lambda: ddp(batch(rank)).sum(), model)
    handle.remove()
    return seen


def two_wrappers_of_one_module(wrap, rank):
    model, seen = mlp(), []
    first, second = wrap(model), wrap(model)
    for i in range(3):
        seen += reduced(lambda i=i: first(batch(rank, i)).sum() + second(batch(rank, i + 7)).sum(), model)
    return seen


PROGRAMS = [
    several_steps, plain_backward_in_a_context, accumulated_in_one_context, with_a_remote_part,
    stepped_by_a_distributed_optimizer, outputs_behind_a_reference, a_hook_of_the_users_raises,
    a_comm_hook_raises, looked_at_and_cleared, two_wrappers_of_one_module,
]  # fmt: skip
# Torch's class raises; or the context's averages go to the bucket whose windows are the `.grad` of before.
NOT_COMPARED = {
    (accumulated_in_one_context, "static"), (several_steps, "views"), (looked_at_and_cleared, "views"),
    (two_wrappers_of_one_module, "static"), (two_wrappers_of_one_module, "views"),
    (a_hook_of_the_users_raises, "static"),
}  # fmt: skip


def on_agents(*sizes, **options):
    """``@on_ranks`` with an agent of RPC on each rank, under whose name the other ranks call it."""

    def decorate(fn):
        @functools.wraps(fn)
        def with_agent(rank, world_size, *arguments):
            port = [free_port()]
            dist.broadcast_object_list(port, 0)
            place = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port[0]}", rpc_timeout=250)
            rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=place)
            fn(rank, world_size, *arguments)
            rpc.shutdown()

        return on_ranks(*sizes, env={"TP_SOCKET_IFNAME": "lo"}, **options)(with_agent)

    return decorate


@pytest.mark.long
@on_agents(2, 3, timeout=900)
def test_the_same_as_with_torch(rank, world_size):
    different = []
    for program, (mode, arguments) in itertools.product(PROGRAMS, MODES.items()):
        if (program, mode) not in NOT_COMPARED:
            theirs, ours = (
                program(lambda module, cls=cls, a=arguments: cls(module, **a), rank)
                for cls in (nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel)
            )
            if differ(theirs, ours):
                different.append(f"{program.__name__} {mode}")
    assert different == []


# ---- where torch has no answer: beside the mean of all ranks' own gradients


def mean_of_own(module, losses):
    """What the context should hold: each rank's gradients by plain autograd, averaged."""
    alone = torch.autograd.grad(losses, list(module.parameters()), allow_unused=True)
    means = []
    for p, own in zip(module.parameters(), alone, strict=True):
        used, mean = torch.tensor(float(own is not None)), torch.zeros_like(p) if own is None else own.clone()
        for tensor in (used, mean):
            dist.all_reduce(tensor)
        means.append(mean / dist.get_world_size() if used else None)
    return means


@pytest.mark.parametrize("views", [False, True])
@on_agents(2, 3)
def test_parameters_that_other_ranks_used_get_their_gradient_in_the_context(rank, world_size, views):
    """Torch's class ends with "The grad for variable should exist in dist_autograd context"."""
    ddp = minddp.DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb_list=[1e-5] * 2
    )
    for i in range(4):
        which = (rank + i) % 2
        expected = mean_of_own(ddp.module, ddp.module(batch(rank, i), which).pow(2).sum())
        assert not differ(expected, reduced(lambda w=which, i=i: ddp(batch(rank, i), w).pow(2).sum(), ddp)[::2])
        assert all(p.grad is None for p in ddp.parameters())
    step = ddp.reducer.last_step()
    body, rests = (ddp.reducer.names.index(name) for name in ("body.weight", "heads.2.weight"))
    bucket = next(i for i, indices in enumerate(ddp.reducer.buckets()) if rests in indices)
    assert body not in ddp.reducer.buckets()[bucket]  # complete before the first gradient, and not at the end
    assert 0 < step["buckets"][bucket]["ready_ns"] < step["ready_ns"][body]


@on_agents(2)
def test_views_of_contexts_are_windows_of_their_own(rank, world_size):
    """Those of `.grad` and those of a context stay what they were."""

    def wrap(module, **arguments):
        return minddp.DistributedDataParallel(module, **arguments)

    expected = several_steps(wrap, rank)
    assert not differ(expected, several_steps(lambda m: wrap(m, **MODES["views"]), rank))
    ddp = wrap(mlp(), gradient_as_bucket_view=True)  # in one bucket: a gradient alone in one is its own
    for i in range(3):  # buckets are what they will be
        ddp.zero_grad()
        ddp(batch(rank, i)).sum().backward()
    windows = [(p.grad, p.grad.clone()) for p in ddp.parameters()]
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(batch(rank)).sum()])
        assert all(torch.equal(window, before) for window, before in windows)
        before = of_context(context, ddp)
        ddp(batch(rank, 1)).sum().backward()
        assert not differ(before[::2], of_context(context, ddp)[::2])


@on_agents(2)
def test_finalized_by_hand(rank, world_size):
    ddp = minddp.DistributedDataParallel(mlp(), bucket_cap_mb_list=[1e-5] * 2)
    ddp.require_manual_backward_finalization = True
    for i in range(3):
        expected = mean_of_own(ddp.module, ddp.module(batch(rank, i)).sum())
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [ddp(batch(rank, i)).sum()])
            assert all(p.grad is None for p in ddp.parameters())
            ddp.finalize_backward()
            assert not differ(expected, of_context(context, ddp)[::2])
        assert all(p.grad is None for p in ddp.parameters())


@on_agents(2)
def test_an_iteration_of_two_backwards_in_one_context(rank, world_size):
    """One iteration in two backwards: the first leaves a half of the parameters out."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]))
    ddp.module.forward = lambda x: (ddp.module[0](x).sum(), ddp.module[1](x).sum())
    expected = mean_of_own(ddp.module, sum(ddp.module(batch(rank))))
    for _ in range(2):
        with dist_autograd.context() as context:
            left, right = ddp(batch(rank))
            dist_autograd.backward(context, [left], retain_graph=True)
            dist_autograd.backward(context, [right])
            assert not differ(expected, of_context(context, ddp)[::2])
    left, right = ddp(batch(rank))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [left], retain_graph=True)
        with pytest.raises(RuntimeError, match="run all of its backwards in one context"):
            right.backward()
    assert ddp.module[0].weight.grad is None
    minddp.abort_iteration(ddp)
    left, right = ddp(batch(rank))
    left.backward(retain_graph=True)
    mine = ddp.module[0].weight.grad.clone()
    with dist_autograd.context() as context, pytest.raises(RuntimeError, match="run all of its backwards in one"):
        dist_autograd.backward(context, [right])
    assert not differ([mine], [ddp.module[0].weight.grad])
    minddp.abort_iteration(ddp)
    ddp.zero_grad()
    sum(ddp(batch(rank))).backward()
    assert not differ(expected, [p.grad for p in ddp.parameters()])


class Several(Branches):
    def forward(self, x, which):
        return sum(self.heads[one](self.body(x)) for one in which)


@on_agents(2)
def test_what_is_known_of_grad_waits_for_a_contexts_end(rank, world_size):
    """A context's iteration in between changes nothing of it. Torch's class steps with local gradients."""

    def iterate(ddp, *arguments):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [ddp(batch(rank, 9), *arguments).sum()])

    for wrapped_again in (False, True):
        ddp = minddp.DistributedDataParallel(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        ddp.module(batch(rank)).sum().backward()
        iterate(minddp.DistributedDataParallel(ddp.module) if wrapped_again else ddp)
        with pytest.raises(RuntimeError, match="never averaged"):
            optimizer.step()
    first = minddp.DistributedDataParallel(mlp())
    second = minddp.DistributedDataParallel(first.module)

    def fail(_):
        raise ValueError("the user's")

    handle = first.module[0].bias.register_hook(fail)
    with pytest.raises(ValueError):
        first(batch(rank)).sum().backward()
    handle.remove()
    iterate(second)  # which averages nothing of what that has left
    with pytest.raises(RuntimeError, match=r"exception|never averaged"):
        torch.optim.SGD(first.parameters(), 0.1).step()
    ddp = minddp.DistributedDataParallel(Several(), find_unused_parameters=True)
    with ddp.no_sync():
        ddp(batch(rank), [0]).sum().backward()
    iterate(ddp, [0, 1, 2])
    ddp(batch(rank, 1), [1]).sum().backward()  # sends what no_sync has left
    assert all_alike(ddp.module.heads[0].weight.grad)


@on_agents(2)
def test_finalized_too_late(rank, world_size):
    ddp = minddp.DistributedDataParallel(mlp())
    ddp.require_manual_backward_finalization = True
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(batch(rank)).sum()])
    dist.barrier()  # the context's end on one rank may come from another's
    with pytest.raises(RuntimeError, match="Call it inside of the context's `with` block"):
        ddp.finalize_backward()
    minddp.abort_iteration(ddp)
    ddp(batch(rank)).sum().backward()
    ddp.finalize_backward()


# ---- what is refused, by name, and leaves `.grad` and the wrapper as they were


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, nested=True):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True) if nested else self.inner(x)


@on_agents(2)
def test_what_cannot_be_reduced_is_refused_by_name(rank, world_size):
    def attempt(ddp, match):
        with dist_autograd.context() as context, pytest.raises(RuntimeError, match=match):
            dist_autograd.backward(context, [ddp(batch(rank)).sum()])

    summed = minddp.DistributedDataParallel(mlp(), reduction="sum")
    attempt(summed, 'parameter \'.*pass reduction="mean"|pass reduction="mean".*parameter \'')
    net = mlp()
    delayed = list(net.named_parameters())[2:]
    first_of_them = {"param_to_hook_all_reduce": delayed[0][1]}
    late = minddp.DistributedDataParallel(net, delay_all_reduce_named_params=delayed, **first_of_them)
    attempt(late, "leave out delay_all_reduce_named_params")
    model = mlp()
    nested = minddp.DistributedDataParallel(Nested(model))
    attempt(nested, "use_reentrant=False")
    minddp.abort_iteration(nested)
    assert all(p.grad is None for p in summed.parameters())
    with dist_autograd.context() as context:
        expected = mean_of_own(model, nested(batch(rank), False).sum())
        minddp.abort_iteration(nested)
        dist_autograd.backward(context, [nested(batch(rank), False).sum()])
        assert not differ(expected, of_context(context, model)[::2])


@on_agents(2)
def test_a_parameter_whose_gradient_is_none(rank, world_size):
    """As in a plain backward. Torch's class fails in an assert of its own."""
    for kwargs in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = Quantized()
        ddp = minddp.DistributedDataParallel(model, **kwargs)
        for i in range(3):
            with dist_autograd.context() as context:
                expected = mean_of_own(model, model(batch(rank, i)).sum())
                dist_autograd.backward(context, [ddp(batch(rank, i)).sum()])
                got = dist_autograd.get_gradients(context)
                for p, mean in zip(model.parameters(), expected, strict=True):
                    zero = torch.zeros_like(p)
                    torch.testing.assert_close(got.get(p, zero), zero if mean is None else mean)
