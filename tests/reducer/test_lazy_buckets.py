"""Buckets that have memory during backward only, beside torch's class where the installed torch has them (2.15)."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.shm
from minddp.testing import run_ranks

TORCH = nn.parallel.DistributedDataParallel
TORCH_HAS_IT = "lazy_bucket_allocation" in inspect.signature(TORCH).parameters
OURS = minddp.DistributedDataParallel
LAZY = {"lazy_bucket_allocation": True}
VIEWS = {"gradient_as_bucket_view": True}


class Net(nn.Module):
    """Layers in a row, one that is used on odd iterations by rank 0 only, one that is never used."""

    def __init__(self, branches=False, size=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(4))
        self.sometimes = nn.Linear(size, size) if branches else None
        self.never = nn.Linear(size, size) if branches else None

    def forward(self, x, sometimes=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if sometimes else x


def _net(branches=False):
    torch.manual_seed(0)
    return Net(branches)


def _x(rank, i, size=64):
    return torch.randn(3, size, generator=torch.Generator().manual_seed(10 * i + rank))


def _train(ddp_class, rank, kwargs, zero_to_none=True, branches=False):
    """What can be seen of some iterations: no_sync, two backwards, an optimizer's step."""
    ddp = ddp_class(_net(branches), **kwargs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for i in range(5):
        optimizer.zero_grad(set_to_none=zero_to_none)
        arguments = (i % 2 == 1 and rank == 0,) if branches else ()
        if i == 2:
            with ddp.no_sync():
                ddp(_x(rank, 20), *arguments).square().sum().backward()
        ddp(_x(rank, i), *arguments).square().sum().backward()
        if i == 3 and "reduction" not in kwargs:
            ddp(_x(rank, 30), *arguments).square().sum().backward()
        seen += [None if p.grad is None else p.grad.clone() for p in ddp.module.parameters()]
        optimizer.step()
    return seen + [p.detach().clone() for p in ddp.module.parameters()]


def _assert_same(ours, theirs, name, exactly=False):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            close = {"rtol": 0, "atol": 0} if exactly else {}
            torch.testing.assert_close(a, b, **close, msg=lambda text: f"{name}: {text}")


CASES = {
    "plain": {},
    "views": VIEWS,
    "small buckets": {"bucket_cap_mb_list": [0.02] * 2},
    "small buckets, views": {"bucket_cap_mb_list": [0.02] * 2, **VIEWS},
    "alone": {"bucket_cap_mb_list": [1e-6] * 2},
    "alone, views": {"bucket_cap_mb_list": [1e-6] * 2, **VIEWS},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "batched, views": {"batched_grad_copy": True, **VIEWS},
}
WITH_BRANCHES = {
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, **VIEWS},
    "unused, small buckets, views": {"find_unused_parameters": True, "bucket_cap_mb_list": [0.02] * 2, **VIEWS},
}
OURS_ALONE = {
    "sum": {"reduction": "sum"},
    "sum, views": {"reduction": "sum", **VIEWS},
    "wide": {"reduce_dtype": torch.float64},
    "checked": {"check_finite": True},
}


def _everywhere(rank, world_size):
    """Lazy gives the bits of eager; and torch's numbers."""
    for branches, cases in ((False, {**CASES, **OURS_ALONE}), (True, WITH_BRANCHES)):
        for name, kwargs in cases.items():
            for to_none in (True, False) if "views" in name else (True,):
                lazy = _train(OURS, rank, {**kwargs, **LAZY}, to_none, branches)
                _assert_same(lazy, _train(OURS, rank, kwargs, to_none, branches), name, exactly=True)
                if TORCH_HAS_IT and name not in OURS_ALONE:
                    _assert_same(lazy, _train(TORCH, rank, {**kwargs, **LAZY}, to_none, branches), name)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lazy_buckets_change_no_number(world_size):
    assert run_ranks(_everywhere, world_size, timeout=150) == [True] * world_size


def _memory(rank, world_size, kwargs):
    """Bytes of buckets: between iterations, when a gradient of the middle arrives, and with eager buckets."""
    found = []
    for lazy in (LAZY, {}):
        ddp = OURS(_net(), bucket_cap_mb_list=[0.02] * 2, **kwargs, **lazy)
        inside, between = [], []
        # Runs before the gradient's own accumulation; layer 3 has its, and none of the last bucket's has come.
        ddp.module.layers[2].weight.register_hook(lambda grad, ddp=ddp: inside.append(ddp.reducer.allocated_bytes()))
        for i in range(3):
            ddp.zero_grad()
            between.append(ddp.reducer.allocated_bytes())
            ddp(_x(rank, i)).sum().backward()
            between.append(ddp.reducer.allocated_bytes())
        found.append((inside, between, sum(ddp.reducer.bucket_nbytes())))
    return found


@pytest.mark.parametrize("kwargs", [{}, VIEWS])
def test_a_lazy_bucket_has_memory_during_backward_only(kwargs):
    for (inside, between, total), (_, eager, _) in run_ranks(_memory, 2, kwargs):
        assert between == [0] * 6
        assert all(0 < one < total for one in inside)
        assert eager[0] == 0 and eager[1] > 0 and eager[3:] == [total] * 3, "the first iteration has other buckets"


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x):
        return self.heads[0](self.body(x))


def _skipped(rank, world_size, kwargs):
    skips = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = OURS(_Heads(), bucket_cap_mb_list=[0.035] * 2, **skips, **kwargs, **LAZY)
    held = []
    for _ in range(4):
        ddp(torch.ones(2, 64)).sum().backward()
        ddp.zero_grad()
        held.append(ddp.reducer.allocated_bytes())
    return held


@pytest.mark.parametrize("kwargs", [{}, VIEWS])
def test_a_lazy_bucket_that_is_not_sent_has_no_memory_either(kwargs):
    assert run_ranks(_skipped, 2, kwargs) == [[0] * 4] * 2


def _in_place(rank, world_size):
    """Gradients that have a bucket of their own, with views: their own memory is sent, in the first iteration too."""
    ddp = OURS(_net(), bucket_cap_mb_list=[1e-6] * 2, **VIEWS, **LAZY)
    made, held = {}, []
    for name, p in ddp.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: made.update({name: p.grad.data_ptr()}))
    for i in range(3):
        ddp.zero_grad()
        ddp(_x(rank, i)).sum().backward()
        held.append(all(p.grad.data_ptr() == made[name] for name, p in ddp.module.named_parameters()))
    return held


def test_a_gradient_reduced_in_place_has_no_bucket():
    assert run_ranks(_in_place, 2) == [[True] * 3] * 2


def _storages(rank, world_size):
    """With views a bucket lives as long as its gradients, and a gradient's new memory is the bucket's."""
    ddp = OURS(_net(), **VIEWS, **LAZY)
    for i in range(3):
        ddp(_x(rank, i)).sum().backward()
        assert len({p.grad.untyped_storage().data_ptr() for p in ddp.module.parameters()}) == 1
        kept = [p.grad for p in ddp.module.parameters()]
        before = [grad.clone() for grad in kept]
        if i == 1:
            ddp.zero_grad()
            ddp(_x(rank, i + 10)).sum().backward()
            _assert_same(kept, before, "what the user holds", exactly=True)
    return True


def test_gradients_keep_their_buckets_memory():
    assert run_ranks(_storages, 2) == [True, True]


def _hooked(rank, world_size):
    """What a communication hook has kept of a bucket stays as it was."""
    ddp = OURS(_net(), bucket_cap_mb_list=[0.02] * 2, **LAZY)
    kept = []

    def hook(state, bucket):
        kept.append((bucket, bucket.buffer()))
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    for i in range(3):
        ddp.zero_grad()
        kept.clear()
        ddp(_x(rank, i)).square().sum().backward()
        averages = torch.cat([g.reshape(-1) for bucket, _ in kept for g in bucket.gradients()])
        grads = torch.cat([p.grad.reshape(-1) for bucket, _ in kept for p in bucket.parameters()])
        assert torch.equal(averages, grads)
        for p in ddp.module.parameters():
            p.grad.zero_()
        assert torch.equal(torch.cat([buffer for _, buffer in kept]), averages)
    return True


def test_a_hook_may_keep_a_lazy_buckets_buffer():
    assert run_ranks(_hooked, 2) == [True, True]


def _given_up(rank, world_size):
    """An exception in the middle of backward on all ranks: abort_iteration() frees what was packed or sent."""
    ddp = OURS(_net(), bucket_cap_mb_list=[0.02] * 2, **LAZY)
    reference = OURS(_net(), bucket_cap_mb_list=[0.02] * 2)
    for i in range(4):
        ddp.zero_grad()
        fails = ddp.module.layers[1].weight.register_hook(lambda grad: 1 / 0)
        if i % 2 == 0:
            fails.remove()
        for p in reference.parameters():
            p.grad = None
        reference(_x(rank, i)).sum().backward()
        if i % 2 == 0:
            ddp(_x(rank, i)).sum().backward()
        else:
            with pytest.raises(ZeroDivisionError):
                ddp(_x(rank, i)).sum().backward()
            assert ddp.reducer.allocated_bytes() > 0
            minddp.abort_iteration(ddp)
            fails.remove()
            assert ddp.reducer.allocated_bytes() == 0
            dist.barrier()
            ddp.zero_grad()
            ddp(_x(rank, i)).sum().backward()
        _assert_same(
            [p.grad for p in ddp.module.parameters()], [p.grad for p in reference.module.parameters()], i, True
        )
    return True


def test_after_an_error():
    assert run_ranks(_given_up, 2) == [True, True]


def _joined(ddp_class, rank, kwargs):
    ddp = ddp_class(_net(), **kwargs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for i in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(_x(rank, i)).square().sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.module.parameters()]


def _join(rank, world_size):
    for kwargs in ({}, VIEWS):
        lazy = _joined(OURS, rank, {**kwargs, **LAZY})
        _assert_same(lazy, _joined(OURS, rank, kwargs), kwargs, exactly=True)
        if TORCH_HAS_IT:
            _assert_same(lazy, _joined(TORCH, rank, {**kwargs, **LAZY}), kwargs)
    return True


def test_in_join():
    assert run_ranks(_join, 3) == [True] * 3


def _remade(rank, world_size):
    ddp = OURS(_net(), **LAZY)
    other = pickle.loads(pickle.dumps(ddp))
    other._set_static_graph()
    minddp.refresh(ddp)
    for wrapper in (ddp, other):
        assert wrapper.lazy_bucket_allocation
        for i in range(2):
            wrapper(_x(rank, i)).sum().backward()
            assert wrapper.reducer.allocated_bytes() == 0
    assert not OURS(_net()).lazy_bucket_allocation
    return True


def test_it_survives_what_makes_the_reducer_anew():
    assert run_ranks(_remade, 2) == [True, True]


def _two_wrappers(rank, world_size):
    """Side by side, one lazy; and around one module, the second beside or after the first."""
    first, second = OURS(_net(), **LAZY), OURS(_net(), **VIEWS)
    pair = OURS(_net()), OURS(_net())
    for i in range(3):
        for a, b in ((first, second), pair):
            a.zero_grad()
            b.zero_grad()
            b(a(_x(rank, i))).square().sum().backward()
        for mine, expected in zip((first, second), pair):
            _assert_same(
                [p.grad for p in mine.module.parameters()], [p.grad for p in expected.module.parameters()], i, True
            )
    again = OURS(first.module, **LAZY)
    reference = OURS(pair[0].module)
    for i in range(3):
        for ddp in (again, reference):
            ddp.zero_grad()
            ddp(_x(rank, i)).square().sum().backward()
        _assert_same(
            [p.grad for p in again.module.parameters()], [p.grad for p in reference.module.parameters()], i, True
        )
    return True


def test_two_wrappers():
    assert run_ranks(_two_wrappers, 2) == [True, True]


def _shared_memory(rank, world_size):
    """The transport's memory, taken and given back: more than there is of it, over all iterations."""
    torch.manual_seed(0)
    ddp = OURS(nn.Linear(1024, 2048, bias=False), **LAZY)  # 8 MiB
    reference = OURS(pickle.loads(pickle.dumps(ddp.module)))
    shared = []
    ddp.register_comm_hook(
        None, lambda state, bucket: (shared.append(minddp.shm.is_shared(bucket.buffer())), _mean(bucket))[1]
    )
    for i in range(40):
        ddp.zero_grad()
        ddp(_x(rank, i, 1024)).sum().backward()
        assert ddp.reducer.allocated_bytes() == 0
    reference(_x(rank, 39, 1024)).sum().backward()
    torch.testing.assert_close(ddp.module.weight.grad, reference.module.weight.grad)
    return all(shared) and len(shared) == 40


def _mean(bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_from_the_transports_memory():
    assert run_ranks(_shared_memory, 2, backend="shm") == [True, True]
