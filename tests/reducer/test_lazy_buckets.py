"""Buckets that have memory during backward only, beside torch's class where the installed torch has them (2.15)."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import gradients
from tests.ranks_pool import run_ranks
from tests.reducer.test_finalization import _assert_same

TORCH = nn.parallel.DistributedDataParallel
TORCH_HAS_IT = "lazy_bucket_allocation" in inspect.signature(TORCH).parameters
OURS = minddp.DistributedDataParallel
LAZY = {"lazy_bucket_allocation": True}
VIEWS = {"gradient_as_bucket_view": True}
SMALL, ALONE = {"bucket_cap_mb_list": [0.02] * 2}, {"bucket_cap_mb_list": [1e-6] * 2}
UNUSED = {"find_unused_parameters": True}


class Net(nn.Module):
    """Layers in a row, one that is used on odd iterations by rank 0 only, one that is never used."""

    def __init__(self, branches=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.sometimes = nn.Linear(64, 64) if branches else None
        self.never = nn.Linear(64, 64) if branches else None

    def forward(self, x, sometimes=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if sometimes and self.sometimes is not None else x


def _wrap(ddp_class=OURS, net=None, **kwargs):
    torch.manual_seed(0)
    return ddp_class(net or Net(branches="find_unused_parameters" in kwargs), **kwargs)


def _x(rank, i, size=64):
    return torch.randn(3, size, generator=torch.Generator().manual_seed(10 * i + rank))


def _backward(ddp, rank, i, *arguments):
    ddp(_x(rank, i), *arguments).square().sum().backward()


# ---- the bits of eager buckets


def _trained(ddp_class, rank, zero_to_none=True, **kwargs):
    """What can be seen of some iterations: no_sync, two backwards, an optimizer's step."""
    ddp = _wrap(ddp_class, **kwargs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for i in range(5):
        optimizer.zero_grad(set_to_none=zero_to_none)
        sometimes = i % 2 == 1 and rank == 0
        if i == 2:
            with ddp.no_sync():
                _backward(ddp, rank, 20, sometimes)
        _backward(ddp, rank, i, sometimes)
        if i == 3 and "reduction" not in kwargs:
            _backward(ddp, rank, 30, sometimes)
        seen += gradients(ddp)
        optimizer.step()
    return seen + [p.detach().clone() for p in ddp.module.parameters()]


def _zeroed(ddp_class, rank, **kwargs):
    return _trained(ddp_class, rank, zero_to_none=False, **kwargs)


def _joined(ddp_class, rank, **kwargs):
    ddp = _wrap(ddp_class, **kwargs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for i in range(2 + 2 * rank):
            optimizer.zero_grad()
            _backward(ddp, rank, i)
            optimizer.step()
    return [p.detach().clone() for p in ddp.module.parameters()]


def _two_wrappers(ddp_class, rank, **kwargs):
    """In one loss, the other one eager; then a second wrapper around the first one's module."""
    first, second = _wrap(ddp_class, **kwargs), _wrap(ddp_class, **VIEWS)
    seen = []
    for i in range(6):
        if i == 3:
            first, second = _wrap(ddp_class, first.module, **kwargs), None
        for ddp in filter(None, (first, second)):
            ddp.zero_grad()
        inner = first(_x(rank, i))
        (inner if second is None else second(inner)).square().sum().backward()
        seen += gradients(*filter(None, (first, second)))
    return seen


BESIDE_TORCH = [
    *((_trained, case) for case in ({}, SMALL, ALONE, {"static_graph": True}, {"batched_grad_copy": True}, UNUSED)),
    *((way, {**VIEWS, **case}) for way in (_trained, _zeroed) for case in ({}, SMALL, ALONE)),
    *((way, {**VIEWS, **UNUSED, **case}) for way in (_trained, _zeroed) for case in ({}, SMALL)),
    *((way, {**VIEWS, "batched_grad_copy": True}) for way in (_trained, _zeroed)),
    *((_joined, case) for case in ({}, VIEWS)),
]
OURS_ALONE = [
    *((_trained, case) for case in ({"reduction": "sum"}, {"reduce_dtype": torch.float64}, {"check_finite": True})),
    *((way, {**VIEWS, "reduction": "sum"}) for way in (_trained, _zeroed)),
    (_two_wrappers, {}),
]


@on_ranks(1, 2, 3, timeout=900)
def test_lazy_buckets_change_no_number(rank, world_size):
    """Lazy gives the bits of eager; and torch's numbers."""
    for program, kwargs in BESIDE_TORCH + OURS_ALONE:
        lazy = program(OURS, rank, **kwargs, **LAZY)
        _assert_same(lazy, program(OURS, rank, **kwargs), rtol=0, atol=0)
        if TORCH_HAS_IT and (program, kwargs) in BESIDE_TORCH:
            _assert_same(lazy, program(TORCH, rank, **kwargs, **LAZY))


# ---- each of these on two ranks


def _memory_during_backward_only(rank, world_size):
    """Bytes of buckets: between iterations, when a gradient of the middle arrives, and with eager buckets."""
    for kwargs in ({}, VIEWS):
        found = []
        for lazy in (LAZY, {}):
            ddp = _wrap(**SMALL, **kwargs, **lazy)
            held = ddp.reducer.allocated_bytes
            inside, between = [], []
            # Runs before the gradient's own accumulation; layer 3 has its, and none of the last bucket's has come.
            ddp.module.layers[2].weight.register_hook(lambda grad, held=held, inside=inside: inside.append(held()))
            for i in range(3):
                ddp.zero_grad()
                between.append(held())
                _backward(ddp, rank, i)
                between.append(held())
            found.append((inside, between, sum(ddp.reducer.bucket_nbytes())))
        (inside, between, total), (_, eager, _) = found
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


def _no_memory_for_what_is_not_sent(rank, world_size):
    skips = {**UNUSED, "skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [0.035] * 2}
    for kwargs in ({}, VIEWS):
        ddp = _wrap(net=_Heads(), **skips, **kwargs, **LAZY)
        for i in range(4):
            _backward(ddp, rank, i)
            ddp.zero_grad()
            assert ddp.reducer.allocated_bytes() == 0


def _no_bucket_for_what_is_reduced_in_place(rank, world_size):
    """Gradients that have a bucket of their own, with views: their own memory is sent, in the first iteration too."""
    ddp = _wrap(**ALONE, **VIEWS, **LAZY)
    made = {}
    for name, p in ddp.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: made.update({name: p.grad.data_ptr()}))
    for i in range(3):
        ddp.zero_grad()
        _backward(ddp, rank, i)
        assert {name: p.grad.data_ptr() for name, p in ddp.module.named_parameters()} == made


def _gradients_keep_the_memory(rank, world_size):
    """With views a bucket lives as long as its gradients, and a gradient's new memory is the bucket's."""
    ddp = _wrap(**VIEWS, **LAZY)
    for i in range(3):
        _backward(ddp, rank, i)
        assert len({p.grad.untyped_storage().data_ptr() for p in ddp.module.parameters()}) == 1
        kept, before = [p.grad for p in ddp.module.parameters()], gradients(ddp)
        if i == 1:
            ddp.zero_grad()
            _backward(ddp, rank, i + 10)
            _assert_same(kept, before, rtol=0, atol=0)


def _mean(bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _hooks_may_keep_a_buffer(rank, world_size):
    """What a communication hook has kept of a bucket stays as it was."""
    ddp = _wrap(**SMALL, **LAZY)
    kept = []
    ddp.register_comm_hook(None, lambda _, bucket: (kept.append((bucket, bucket.buffer())), _mean(bucket))[1])
    for i in range(3):
        ddp.zero_grad()
        kept.clear()
        _backward(ddp, rank, i)
        averages = torch.cat([g.reshape(-1) for bucket, _ in kept for g in bucket.gradients()])
        grads = torch.cat([p.grad.reshape(-1) for bucket, _ in kept for p in bucket.parameters()])
        assert torch.equal(averages, grads)
        for p in ddp.module.parameters():
            p.grad.zero_()
        assert torch.equal(torch.cat([buffer for _, buffer in kept]), averages)


def _after_an_error(rank, world_size):
    """An exception in the middle of backward on all ranks: abort_iteration() frees what was packed or sent."""
    ddp, reference = _wrap(**SMALL, **LAZY), _wrap(**SMALL)
    for i in range(4):
        ddp.zero_grad()
        reference.zero_grad()
        if i % 2:
            fails = ddp.module.layers[1].weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                _backward(ddp, rank, i)
            assert ddp.reducer.allocated_bytes() > 0
            minddp.abort_iteration(ddp)
            fails.remove()
            assert ddp.reducer.allocated_bytes() == 0
            dist.barrier()
            ddp.zero_grad()
        for one in (ddp, reference):
            _backward(one, rank, i)
        _assert_same(gradients(ddp), gradients(reference), rtol=0, atol=0)


def _remade(rank, world_size):
    """The option survives copies, and what makes the reducer anew."""
    ddp = _wrap(**LAZY)
    other = pickle.loads(pickle.dumps(ddp))
    other._set_static_graph()
    minddp.refresh(ddp)
    for wrapper in (ddp, other):
        assert wrapper.lazy_bucket_allocation
        for i in range(2):
            _backward(wrapper, rank, i)
            assert wrapper.reducer.allocated_bytes() == 0
    assert not _wrap().lazy_bucket_allocation


CHECKS = [
    _memory_during_backward_only, _no_memory_for_what_is_not_sent, _no_bucket_for_what_is_reduced_in_place,
    _gradients_keep_the_memory, _hooks_may_keep_a_buffer, _after_an_error, _remade,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_on_two_ranks(check):
    run_ranks(check, 2)
