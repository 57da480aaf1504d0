"""Whose backward is it? What torch's class gets right must run; what it lets drift apart must raise."""

import contextlib
import copy
import re
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.utils.checkpoint import checkpoint

import minddp
from minddp.guards import times
from tests.nets import OneOf
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import batch, mlp, those_that_differ, weights
from tests.ranks_pool import RankError, run_ranks, shutdown


def _sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


# ---- right with torch: the same weights with minddp


def logged_forward_then_no_sync(wrap, rank):
    """A synchronized forward whose backward never comes adopts the next one."""
    model = wrap(mlp())
    for i in range(3):
        model.zero_grad()
        with model.no_sync():
            out = model(batch(rank, i))
        model(batch(rank, i + 1)).detach()
        out.pow(2).sum().backward()
        _sgd(model).step()
    return weights(model)


def a_static_graph_is_that_of_its_own_outputs(wrap, rank):
    """While the first forward waits, another backward is none of its: local, with torch's class too."""
    net = mlp()
    model = wrap(net, static_graph=True)
    past = net(batch(rank))
    model(batch(rank, 1))
    past.pow(2).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def _penalized(model, rank, i):
    model.zero_grad()
    model(batch(rank, i)).pow(2).mean().backward()
    (0.1 * sum(p.pow(2).sum() for p in model.parameters() if p.dim() > 1)).backward()


def a_penalty_where_each_rank_steps_its_share(wrap, rank):
    """All that the penalty has touched is rank 0's."""
    model = wrap(mlp())
    parameters = list(model.parameters())
    mine = parameters[rank::2] if rank < 2 else [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.Adam(mine, 0.1)
    for i in range(3):
        _penalized(model, rank, i)
        optimizer.step()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, number % 2)
    return weights(model)


def a_penalty_where_rank_0_alone_steps(wrap, rank):
    with times.faster(0.05):
        model = wrap(mlp())
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for i in range(2):
            _penalized(model, rank, i)
            if rank == 0:
                optimizer.step()
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
    return weights(model)


def probe_in_another_thread(wrap, rank):
    """Each thread numbers its nodes from 0."""
    model = wrap(mlp())

    def in_thread(f):
        thread = threading.Thread(target=f)
        thread.start()
        thread.join()

    for i in range(3):
        model.zero_grad()
        in_thread(lambda i=i: model(batch(rank, i)).pow(2).sum().backward())
        _sgd(model).step()
        model.zero_grad()
        if rank == 0:
            in_thread(lambda: model.module(batch(rank)).sum().backward())
            model.zero_grad()
    return weights(model)


class Box:
    def __init__(self, loss):
        self.loss = loss


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.w


def penalty_with_a_forward_between(wrap, rank):
    model = wrap(Scale())
    for i in range(3):
        model.zero_grad()
        x = batch(rank, i).requires_grad_()
        (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        model(batch(rank, i + 1))
        g.pow(2).mean().backward()
        _sgd(model, 0.01).step()
    return weights(model)


def copied_on_one_rank(wrap, rank):
    """Wrappers are not numbered alike on the ranks."""
    first = wrap(mlp())
    kept = copy.deepcopy(first) if rank == 0 else None
    model = wrap(mlp())
    for i in range(3):
        model.zero_grad()
        model(batch(rank, i)).pow(2).mean().backward()
        sum(p.pow(2).sum() * 0.1 for p in model.parameters()).backward()
        _sgd(model).step()
    return weights(model) if kept is None or kept is not None else []


def probe_then_own_gradients(wrap, rank):
    """What the probe left was dropped; what is stepped on came through the wrapper."""
    model = wrap(mlp())
    for i in range(3):
        model.zero_grad()
        model(batch(rank, i)).pow(2).mean().backward()
        stash = [p.grad for p in model.parameters()]
        model.zero_grad()
        if rank == 0:
            model.module(batch(rank)).sum().backward()
        for p, grad in zip(model.parameters(), stash):
            p.grad = grad
        _sgd(model).step()
    return weights(model)


def with_a_closure(wrap, rank):
    model = wrap(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for i in range(2):

        def closure(i=i):
            optimizer.zero_grad()
            loss = model(batch(rank, i)).pow(2).mean()
            loss.backward()
            return 0.0 * loss.detach()  # local losses would end the search at other places

        model.module(batch(rank)).sum().backward()  # the closure zeroes it
        optimizer.step(closure)
    return weights(model)


class _Checkpointed(nn.Module):
    """A reentrant checkpoint: its parameters' gradients come in a graph task of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=True)


def old_wrapper_and_a_reentrant_checkpoint(wrap, rank):
    """The old wrapper sees the new one's gradients, nested ones too, where the other ranks are out of batches."""
    torch.manual_seed(0)
    old = wrap(_Checkpointed())
    model = wrap(old.module)
    optimizer = _sgd(old)
    with model.join():
        for i in range(3 if rank == 0 else 2):
            optimizer.zero_grad()
            model(batch(rank, i)[: 2 + rank]).pow(2).sum().backward()
            optimizer.step()
    return weights(model)


def forward_on_one_rank_after_a_step(wrap, rank):
    """With find_unused_parameters, and no buffers, forward has no collective in it."""
    trained = []
    for skip in (False, True):
        model = wrap(mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=skip)
        for i in range(3):
            model.zero_grad()
            model(batch(rank, i)).pow(2).sum().backward()
            if rank == 1:
                model(batch(rank, i + 1)).detach()
            torch.distributed.barrier()
            _sgd(model).step()
        trained += weights(model)
    return trained


def a_hook_after_the_first_steps(wrap, rank):
    model = wrap(mlp())
    for i in range(6):
        if i in (2, 4):
            model = wrap(model.module) if i == 4 else model
            model.register_comm_hook(None, fp16_compress_hook if i == 2 else allreduce_hook)
        model.zero_grad()
        model(batch(rank, i)).pow(2).sum().backward()
        _sgd(model).step()
    return weights(model)


def a_step_in_a_hooks_callback(wrap, rank):
    """By hand what torch's _hook_then_optimizer does, on whichever thread the collective ends."""
    model = wrap(mlp(), bucket_cap_mb_list=[1e-5] * 2)
    optimizers = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in model.parameters()}

    def hook(_, bucket):
        def step(future):
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.grad = gradient
                optimizers[parameter].step()
            return bucket.buffer()

        return allreduce_hook(None, bucket).then(step)

    model.register_comm_hook(None, hook)
    for i in range(4):
        model(batch(rank, i)).pow(2).sum().backward()
        model.zero_grad()
    return weights(model)


class _Prompt(nn.Module):
    """Its output is its parameter: no node of the graph is of its forward."""

    def __init__(self):
        super().__init__()
        self.learned = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.learned


def a_parameter_as_the_output(wrap, rank):
    """Local steps, and then some that are averaged."""
    model = wrap(_Prompt())
    for i in range(4):
        model.zero_grad()
        with model.no_sync() if i < 2 else contextlib.nullcontext():
            (model() + rank + i).pow(2).sum().backward()
        _sgd(model).step()
    return weights(model)


class _Half(nn.Module):
    """Shares ``layer``, and never uses ``idle``."""

    def __init__(self, layer, idle=None):
        super().__init__()
        self.layer, self.idle = layer, idle

    def forward(self, x):
        return self.layer(x)


def unused_in_one_of_two_wrappers(wrap, rank):
    """The first is not finished; the second has averaged all that there is."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    first, second = wrap(_Half(layer, nn.Linear(4, 4))), wrap(_Half(layer))
    (first(batch(rank)) + second(batch(rank, 1))).pow(2).sum().backward()
    _sgd(second).step()
    return weights(second)


def interrupted_in_one_of_two_wrappers(wrap, rank):
    """What an exception has left in .grad is averaged by the second, together with its own."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return _interrupted_then_averaged(wrap(_Half(layer)), wrap(_Half(layer)), layer, rank)


def _interrupted_then_averaged(first, second, layer, rank):
    handle = layer.bias.register_post_accumulate_grad_hook(_raises)
    with pytest.raises(ValueError, match="on purpose"):
        first(batch(rank)).pow(2).sum().backward()
    handle.remove()
    second(batch(rank, 1)).pow(2).sum().backward()
    _sgd(second).step()
    return weights(second)


class _Branch(nn.Module):
    """A layer of its own, and one that the second rank alone uses."""

    def __init__(self, branch, rank):
        super().__init__()
        self.own, self.branch, self.rank = nn.Linear(4, 4), branch, rank

    def forward(self, x):
        return self.branch(self.own(x)) if self.rank == 1 else self.own(x)


def interrupted_before_another_wrappers_backward(wrap, rank):
    """The backward of the second reaches the first on one rank alone, and does not end what was interrupted there."""
    torch.manual_seed(0)
    branch = nn.Linear(4, 4)
    first = wrap(_Branch(branch, rank), static_graph=True)
    second = wrap(_Branch(branch, rank), find_unused_parameters=True)
    return _interrupted_then_averaged(first, second, first.module.own, rank)


def _raises(*_):
    raise ValueError("on purpose")


def forwards_on_one_rank_with_a_static_graph(wrap, rank):
    """Buckets are cut anew in a forward, together: with a static graph after the second backward, not the first."""
    model = wrap(mlp(), static_graph=True, bucket_cap_mb_list=[1e-4] * 2)
    optimizer = _sgd(model)
    for i in range(4):
        optimizer.zero_grad()
        model(batch(rank, i)).pow(2).sum().backward()
        optimizer.step()
        if i != 1 and rank == 1:
            x = batch(rank).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        dist.all_reduce(torch.ones(1))
    return weights(model)


def after_an_exception_before_any_gradient(wrap, rank):
    """A backward that the module's hook has ended, and then one of an older forward: that one is averaged."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.a, self.b = mlp(), nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.a(h), self.b(h)

    model = wrap(Heads(), find_unused_parameters=True)
    older = model(batch(rank))

    handle = model.module.register_full_backward_hook(_raises)
    newer = model(batch(rank, 1))
    handle.remove()
    with pytest.raises(ValueError, match="on purpose"):
        newer[0].sum().backward()
    older[0].sum().backward()
    _sgd(model).step()
    return weights(model)


def local_steps_with_a_penalty_and_past_the_wrapper(wrap, rank):
    """Each rank trains by itself for three steps, and then all together."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for i in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            (model if i < 2 else model.module)(batch(rank, i)).pow(2).sum().backward()
            sum(p.pow(2).sum() for p in model.parameters()).backward()
        optimizer.step()
    optimizer.zero_grad()
    model(batch(rank, 3)).pow(2).sum().backward()
    return [*(p.grad.clone() for p in model.parameters()), *weights(model)]


def penalties_in_a_join(wrap, rank):
    """A rank that has no more data is asked for nothing."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join():
        for i in range(2 + rank):
            optimizer.zero_grad()
            if i % 2:
                sum(p.pow(2).sum() for p in model.parameters()).backward()
            model(batch(rank, i)).pow(2).sum().backward()
            if not i % 2:
                sum(p.pow(2).sum() for p in model.parameters()).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


class _CheckpointedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, within):
        used = self.used(x)
        return checkpoint(self.other, used, use_reentrant=True) if within else self.other(used)


def adopted_with_absent_parameters(wrap, rank):
    """An adopted backward launches nothing at its beginning."""
    torch.manual_seed(0)
    ddp = wrap(_CheckpointedHead(), find_unused_parameters=True, bucket_cap_mb_list=[1e-6] * 2)
    x = torch.full((2, 3), rank + 1.0)
    for _ in range(3):
        ddp(x, False).sum().backward()
    ddp.zero_grad()
    with ddp.no_sync():
        local = ddp(x, True)
    ddp(x, False)
    local.sum().backward()
    return [ddp.module.other.weight.grad]


def an_old_forward_under_no_sync(wrap, rank):
    ddp = wrap(mlp())
    optimizer = _sgd(ddp)
    with ddp.no_sync():
        losses = [ddp(batch(rank, i)).sum() for i in range(70)]  # of the last 64 the reducer knows the nodes
        losses[0].backward()
    optimizer.step()
    return weights(ddp)


class _Feature(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x, feature=None):
        feature = self.body(x) if feature is None else feature
        return self.head(feature).sum(), feature


def left_by_a_synchronized_forward(wrap, rank):
    """A kept feature, on all ranks and on one; a second backward; autocast's copy of a weight: under no_sync.
    And a backward outside, after a forward under no_sync."""
    torch.manual_seed(0)
    found = []
    ddp = wrap(_Feature())
    for again in ("feature", "rank 0's feature", "backward", "part", "outside"):
        for _ in range(2):
            ddp.zero_grad()
            loss, feature = ddp(batch(rank))
            loss.backward(retain_graph=True)
        ddp.zero_grad()
        if again == "outside":  # ranks' graphs differ
            with ddp.no_sync():
                local = ddp(batch(rank, 1))[0]
            (loss + local if rank else loss).backward()
            found += [p.grad.clone() for p in ddp.parameters()]
            continue
        with ddp.no_sync():
            if again == "backward":
                loss.backward(retain_graph=True)
            else:
                kept = feature if again == "feature" or rank == 0 else feature.detach()
                inputs = list(ddp.module.head.parameters()) if again == "part" else None
                ddp(None, kept)[0].square().backward(retain_graph=True, inputs=inputs)
        found += [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ddp(batch(rank))[0].backward()
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch(rank))[0].backward()
    return found + [p.grad for p in ddp.parameters()]


def a_penalty_under_no_sync(wrap, rank):
    """A penalty's gradient is adopted by the forward that waits; what is made of it stays the other forward's."""
    ddp = wrap(mlp())
    loss = ddp(batch(rank)).sum()
    x = batch(rank, 1).requires_grad_()
    with ddp.no_sync():
        y = ddp(x).square()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss.backward()
    ddp.zero_grad()
    with ddp.no_sync():
        (gradient.square().sum() + y.sum()).backward()
    return [p.grad for p in ddp.parameters()]


def a_penalty_alone_under_no_sync(wrap, rank):
    """The same, of a module whose penalty has no node of the forward's."""
    ddp = wrap(Scale())
    x = batch(rank, 1).requires_grad_()
    with ddp.no_sync():
        local = ddp(x).sum()
    loss = ddp(batch(rank)).sum()
    (gradient,) = torch.autograd.grad(local, x, create_graph=True)
    loss.backward()
    ddp.zero_grad()
    (gradient * x).sum().backward()
    return [p.grad for p in ddp.parameters()]


def a_step_on_zeros_that_one_rank_has(wrap, rank):
    model = wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        model.module(batch(rank)).pow(2).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # zeros here, None there
    return weights(model)


RIGHT = [
    logged_forward_then_no_sync, a_static_graph_is_that_of_its_own_outputs, a_penalty_where_each_rank_steps_its_share,
    a_penalty_where_rank_0_alone_steps, probe_in_another_thread, penalty_with_a_forward_between,
    copied_on_one_rank, with_a_closure, probe_then_own_gradients,
    old_wrapper_and_a_reentrant_checkpoint, forward_on_one_rank_after_a_step, a_hook_after_the_first_steps,
    a_step_in_a_hooks_callback, a_parameter_as_the_output, unused_in_one_of_two_wrappers,
    interrupted_in_one_of_two_wrappers, interrupted_before_another_wrappers_backward,
    forwards_on_one_rank_with_a_static_graph,
    after_an_exception_before_any_gradient, local_steps_with_a_penalty_and_past_the_wrapper, penalties_in_a_join,
    adopted_with_absent_parameters, an_old_forward_under_no_sync, left_by_a_synchronized_forward,
    a_penalty_under_no_sync, a_penalty_alone_under_no_sync, a_step_on_zeros_that_one_rank_has,
]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_torch_trains_right(world_size):
    assert those_that_differ(RIGHT, world_size) == []


# ---- drifts apart with torch, without a word: raises before the step on every rank


def other_rows_of_a_table(wrap, rank):
    """The gradients have the same norm, and their values the same sum."""
    _other_rows(wrap, rank, sparse=False)


def other_rows_of_a_sparse_table(wrap, rank):
    _other_rows(wrap, rank, sparse=True)


def _other_rows(wrap, rank, sparse):
    model = wrap(nn.Embedding(5, 2, sparse=sparse))
    model.module(torch.tensor([rank])).sum().backward()
    _sgd(model).step()


def a_closure_past_the_wrapper(wrap, rank):
    model = wrap(mlp())

    def closure():
        loss = model.module(batch(rank)).pow(2).mean()
        loss.backward()
        return loss

    _sgd(model).step(closure)


def static_and_unused_at_first(wrap, rank):
    model = wrap(OneOf({which: nn.Linear(4, 2) for which in "ab"}), static_graph=True)
    for i in range(2):
        model(batch(rank, i), "a").pow(2).sum().backward()
    model.zero_grad()
    model.module(batch(rank, 7), "b").pow(2).sum().backward()
    model(batch(rank, 3), "a").pow(2).sum().backward()
    _sgd(model).step()


def step_in_a_gradient_hook(wrap, rank):
    model = wrap(mlp())
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for i in range(2):
        model(batch(rank, i)).pow(2).sum().backward()


def step_in_the_hook_of_the_first_gradient(wrap, rank):
    """Nothing of the backward has arrived yet."""
    model = wrap(nn.Linear(4, 2, bias=False))
    optimizer = _sgd(model)
    model.module.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step() and None)
    for i in range(2):
        model(batch(rank, i)).pow(2).sum().backward()


DRIFT = [
    other_rows_of_a_table, other_rows_of_a_sparse_table, a_closure_past_the_wrapper, static_and_unused_at_first,
    step_in_a_gradient_hook, step_in_the_hook_of_the_first_gradient,
]  # fmt: skip


@on_ranks(2, 3)
def test_what_torch_lets_drift_apart(rank, world_size):
    warnings.simplefilter("ignore")
    silent = []
    for program in DRIFT:
        try:
            program(minddp.DistributedDataParallel, rank)
            silent.append(program.__name__)
        except RuntimeError as error:
            if "never averaged" not in str(error) and "before they are averaged" not in str(error):
                raise
    assert not silent


# ---- on one rank alone


@times.faster(0.2)
def _past_it_on_one_rank(rank, world_size, iteration, with_buffers):
    """The others wait in their next forward (for new buckets, or buffers), or in its backward."""
    layers = [mlp(), nn.BatchNorm1d(2)] if with_buffers else [mlp()]
    model = minddp.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = _sgd(model)
    with pytest.raises(RuntimeError) as raised:
        for i in range(5):
            optimizer.zero_grad()
            forward = model.module if rank == 1 and i == iteration else model
            forward(batch(rank, i)).pow(2).sum().backward()
            optimizer.step()
    # The first of the others to raise ends as well, and the last one may see both.
    both = "ranks 0, 1" if rank else "ranks 1, 2"
    others = f"(rank 1|{both}) will not take part"
    expected = "would use gradients that were never averaged" if rank == 1 else others
    assert i == iteration and re.search(expected, str(raised.value)), raised.value


@pytest.mark.parametrize("with_buffers", [False, True], ids=["", "buffers"])
@pytest.mark.parametrize(("world_size", "iteration"), [(2, 1), (3, 2)])
def test_a_rank_that_goes_past_it_alone_is_stopped_before_its_step(world_size, iteration, with_buffers):
    try:
        run_ranks(_past_it_on_one_rank, world_size, iteration, with_buffers)
    finally:
        shutdown()


@on_ranks(2, 3)
def test_a_sparse_gradient_of_two_wrappers_is_the_mean(rank, world_size):
    """Torch's class divides it once for each wrapper whose forward ran."""
    grads = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=sparse)
        first = minddp.DistributedDataParallel(nn.Sequential(table, nn.Linear(2, 2)))
        second = minddp.DistributedDataParallel(_Half(table))
        rows = torch.tensor([1, 2 + rank])
        first(rows)
        second(rows).pow(2).sum().backward()
        grads.append(table.weight.grad.to_dense())
    assert torch.equal(*grads)


# ---- reductions of minddp's own


@on_ranks(2, 3)
def test_a_gradient_assigned_by_hand_is_summed(rank, world_size):
    """A gradient that the program has put there is this rank's own, whatever was there before."""
    for reduction in ("sum", "weighted"):
        model = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), reduction=reduction)
        weight = model.module.weight
        for i in range(3):
            weight.grad = torch.full_like(weight, rank + 1.0) if i else None
            if reduction == "weighted":
                minddp.add_weight(model, 0.5)
            model(torch.ones(1, 1)).sum().backward()
            total = world_size + (sum(range(1, world_size + 1)) if i else 0)
            expected = total / (0.5 * world_size if reduction == "weighted" else 1)
            assert weight.grad.item() == pytest.approx(expected), (reduction, i)


# ---- two wrappers of one parameter, both in one loss


def _shared_layer(rank, world_size, views):
    """Chained: the second's input is the first's output. Without views, as a single process that has both batches."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    first = minddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), shared), gradient_as_bucket_view=views[0])
    second = minddp.DistributedDataParallel(nn.Sequential(shared, nn.Linear(4, 1)), gradient_as_bucket_view=views[1])
    parameters = [*{id(p): p for m in (first, second) for p in m.parameters()}.values()]
    alone = copy.deepcopy(nn.ModuleList([first.module, second.module]))
    for i in range(3):
        for p in (*parameters, *alone.parameters()):
            p.grad = None
        x = batch(rank, i)
        hidden = first(x)
        (second(hidden).sum() + hidden.pow(2).sum()).backward()
        everyone = torch.cat([batch(other, i) for other in range(world_size)])
        hidden = alone[0](everyone)
        ((alone[1](hidden).sum() + hidden.pow(2).sum()) / world_size).backward()
    return [torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5) for p, q in zip(parameters, alone.parameters())]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_that_two_wrappers_reduce_in_one_backward(world_size):
    assert all(all(same) for same in run_ranks(_shared_layer, world_size, (False, False)))
    for views in ((True, True), (True, False), (False, True)):
        with pytest.raises(RankError) as raised:
            run_ranks(_shared_layer, world_size, views)
        for text in raised.value.failures.values():
            assert "belongs to two wrappers that both reduce its gradient in this backward" in text
            assert "Parameter '1.weight'" in text or "Parameter '0.weight'" in text or ".bias'" in text
