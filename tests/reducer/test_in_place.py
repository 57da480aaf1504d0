"""Gradients that are reduced where they lie, and those that are packed before their bucket is complete."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minddp
from tests.nets import OneOf
from tests.on_ranks import on_ranks
from tests.ranks_pool import RankError, run_ranks
from tests.reducer.late import LateGroup, LateWork

ALONE = {"bucket_cap_mb_list": [1e-6] * 2}  # every gradient has a bucket of its own


def _means(module, loss):
    """What the ranks' gradients should become: those of a backward without DDP, averaged."""
    module.zero_grad()
    loss(module).backward()
    means = []
    for p in module.parameters():
        means.append(None if p.grad is None else p.grad.clone())
        if means[-1] is not None:
            dist.all_reduce(means[-1])
            means[-1] /= dist.get_world_size()
    module.zero_grad()
    return means


def _assert_grads(module, expected):
    for (name, p), mean in zip(module.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (mean is None), name
        if mean is not None:
            torch.testing.assert_close(p.grad, mean, msg=lambda text, name=name: f"{name}: {text}")


def _input(rank, iteration, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * iteration + rank))


# ---- in the gradient's own memory


def _large_gradient(rank, world_size, views, held):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 1 << 15), nn.Tanh(), nn.Linear(1 << 15, 2))  # 8 MiB, and 256 KiB
    made = {}
    large = module[0].weight
    if views or held:
        large.register_post_accumulate_grad_hook(lambda p: made.update(grad=p.grad.data_ptr()))
    else:  # Python must not have seen .grad itself, which it then holds
        large.register_hook(lambda grad: made.update(grad=grad.data_ptr()))
    ddp = minddp.DistributedDataParallel(module, gradient_as_bucket_view=views)
    in_place, kept = [], []
    for iteration in range(3):
        x = _input(rank, iteration, 4, 64)
        with ddp.no_sync():
            expected = _means(module, lambda m, x=x: m(x).square().sum())
        kept.append(large.register_post_accumulate_grad_hook(lambda p: made.update(held=p.grad.view(-1))))
        if not held:
            kept.pop().remove()
        ddp(x).square().sum().backward()
        _assert_grads(module, expected)
        in_place.append(large.grad.data_ptr() == made["grad"])
        if held:
            assert torch.equal(made["held"], large.grad.view(-1))
    buckets = [len(bucket) for bucket in ddp.reducer.buckets()]
    return in_place, sorted(buckets), ddp.reducer.allocated_bytes(), large.numel() * 4


@pytest.mark.parametrize(
    ("views", "held", "where"),
    [(True, False, [False, True, True]), (False, False, [False] * 3), (False, True, [True] * 3)],
)
def test_where_a_large_gradient_is_reduced(views, held, where):
    """With views, after the first iteration and with the default caps: in its own memory, which is its bucket.

    Without them it changes memory with its bucket, and its own is the next bucket; in the first iteration one bucket
    holds all. What somebody holds is written to.
    """
    for in_place, buckets, allocated, large in run_ranks(_large_gradient, 2, views, held):
        assert in_place == where or (not views and not held and in_place == [True, False, False])
        assert held or buckets == [1, 3]
        assert held or (0 < allocated < large / 4 if views else allocated > large)


@on_ranks(2)
def test_memory_that_somebody_keeps_is_not_exchanged(rank, world_size):
    """A hook keeps the memory of what becomes .grad, and not the tensor: it shows the result, and no later buffer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 1 << 15), nn.Tanh(), nn.Linear(1 << 15, 2))
    kept, results = [], []
    module[0].weight.register_hook(lambda grad: kept.append(grad.detach()))
    ddp = minddp.DistributedDataParallel(module)
    for iteration in range(4):
        ddp.zero_grad()
        ddp(_input(rank, iteration, 4, 64)).square().sum().backward()
        results.append(module[0].weight.grad.clone())
    assert all(torch.equal(memory, result) for memory, result in zip(kept, results, strict=True))


class Shared(nn.Module):
    """Gradients that are windows on one tensor: a sum's two are the same memory, cat's are neighbours."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))
        self.c, self.d = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5, 4))

    def forward(self, x):
        return torch.cat([self.c, self.d]) * x + (self.a.view(-1) + self.b.view(-1)).view(8, 4) * x


@pytest.mark.parametrize("kwargs", [{}, ALONE, {**ALONE, "gradient_as_bucket_view": True}])
@on_ranks(2)
def test_gradients_that_share_memory(rank, world_size, kwargs):
    module = Shared()
    ddp = minddp.DistributedDataParallel(module, **kwargs)
    for iteration in range(3):
        x = _input(rank, iteration, 8, 4)
        with ddp.no_sync():
            expected = _means(module, lambda m, x=x: m(x).sum())
        ddp(x).sum().backward()
        assert kwargs or module.a.grad.data_ptr() == module.b.grad.data_ptr()  # else nothing is tested here
        _assert_grads(module, expected)


@on_ranks(2)
def test_what_a_hook_has_kept_is_left_alone(rank, world_size):
    """Of a gradient that a tensor hook has kept, what was kept stays this rank's own."""
    module = nn.Linear(6, 3)
    kept = []
    module.weight.register_hook(lambda grad: kept.append(grad))
    ddp = minddp.DistributedDataParallel(module, **ALONE)
    for iteration in range(3):
        module.zero_grad()
        ddp(torch.full((1, 6), float(rank + iteration))).sum().backward()
        assert torch.equal(kept[-1], torch.full((3, 6), float(rank + iteration)))
        assert torch.equal(module.weight.grad, torch.full((3, 6), iteration + 0.5))


@on_ranks(2)
def test_accumulation_in_place(rank, world_size):
    """The second gradient is added to the first: with no_sync, without, and to zeros."""
    module = nn.Linear(6, 3, bias=False)
    ddp = minddp.DistributedDataParallel(module, **ALONE)
    ones = torch.ones(3, 6)
    for _ in range(2):
        module.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 6), 1.0 + rank)).sum().backward()
        assert torch.equal(module.weight.grad, ones * (1.0 + rank))
        ddp(torch.full((1, 6), 3.0 + rank)).sum().backward()
        assert torch.equal(module.weight.grad, ones * 5.0)
        held = module.weight.grad
        ddp(torch.full((1, 6), 1.0 * rank)).sum().backward()
        assert module.weight.grad is held and torch.equal(held, ones * 5.5)
        module.zero_grad(set_to_none=False)
        ddp(torch.full((1, 6), 1.0 * rank)).sum().backward()
        assert module.weight.grad is held and torch.equal(held, ones * 0.5)


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_what_no_rank_used_is_left_alone(rank, world_size, static):
    """What no rank used stays as it was, to the bit and different on every rank; used on one: a mean with zeros."""
    module = OneOf({side: nn.Linear(4, 4, bias=False) for side in ("left", "right")})
    ddp = minddp.DistributedDataParallel(module, find_unused_parameters=not static, static_graph=static, **ALONE)
    ones = torch.ones(4, 4)
    for _ in range(3):
        module.right.weight.grad = ones * (1 / 3 + rank)
        module.left.weight.grad = None
        ddp(torch.full((1, 4), 1.0 + rank), "left").sum().backward()
        assert torch.equal(module.left.weight.grad, ones * 1.5)
        assert torch.equal(module.right.weight.grad, ones * (1 / 3 + rank))
    if not static:
        module.zero_grad()
        ddp(torch.ones(1, 4), "left" if rank == 0 else "right").sum().backward()
        assert torch.equal(module.left.weight.grad, ones * 0.5)
        assert torch.equal(module.right.weight.grad, ones * 0.5)


def _other_result(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 0 + 7)
    return future


@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_as_bucket_view": True}, {**ALONE, "gradient_as_bucket_view": True}]
)
@on_ranks(2)
def test_gradients_that_a_module_has_moved(rank, world_size, arguments):
    """module.to(memory_format=...) moves the gradients that there are, windows on a bucket among them."""
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3))
    ddp = minddp.DistributedDataParallel(module, **arguments)
    for iteration in range(4):
        if iteration == 2:
            ddp.to(memory_format=torch.channels_last)
        x = _input(rank, iteration, 2, 3, 8, 8)
        with ddp.no_sync():
            kept = [p.grad for p in module.parameters()]
            expected = _means(module, lambda m, x=x: m(x).square().mean())
            for p, grad in zip(module.parameters(), kept):
                p.grad = grad
        ddp.zero_grad(set_to_none=False)
        ddp(x).square().mean().backward()
        _assert_grads(module, expected)


def _in_place_hook(state, bucket):
    assert bucket.buffer().shape == (bucket.parameters()[0].numel(),)
    assert bucket.gradients()[0].shape == bucket.parameters()[0].shape
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@on_ranks(2)
def test_hooks_see_the_gradients_own_memory(rank, world_size):
    results = []
    for hook in (_other_result, _in_place_hook):
        module = nn.Conv2d(4, 6, 3, bias=False).to(memory_format=torch.channels_last)
        ddp = minddp.DistributedDataParallel(module, **ALONE)
        ddp.register_comm_hook(None, hook)
        for iteration in range(2):
            x = _input(rank, iteration, 2, 4, 8, 8)
            with ddp.no_sync():
                expected = _means(module, lambda m, x=x: m(x).square().sum())
            ddp(x).square().sum().backward()
            results.append(module.weight.grad.clone() if hook is _other_result else None)
            if hook is _in_place_hook:
                _assert_grads(module, expected)
    assert torch.equal(results[1], torch.full((6, 4, 3, 3), 7.0))


@on_ranks(2)
def test_a_gradient_with_a_graph_is_copied(rank, world_size):
    """A gradient with a graph of its own is copied: its graph must stay what it is."""
    module = nn.Linear(3, 1, bias=False)
    ddp = minddp.DistributedDataParallel(module, **ALONE)
    for _ in range(2):
        module.zero_grad()
        ddp(torch.full((1, 3), 1.0 + rank)).pow(3).sum().backward(create_graph=True)
        assert module.weight.grad.requires_grad
        expected = [torch.zeros(1, 3)]
        for r in range(world_size):
            x = torch.full((1, 3), 1.0 + r)
            expected[0] += 3 * module.weight.detach().mul(x).sum() ** 2 * x / world_size
        torch.testing.assert_close(module.weight.grad.detach(), expected[0])


# ---- packed before the bucket is complete


class Repeated(nn.Module):
    """``shared`` (64 KiB) gets one contribution for each checkpoint; ``first`` completes the bucket."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 128)
        self.shared = nn.Linear(128, 128)

    def forward(self, x, uses):
        x = self.first(x)
        for _ in range(uses):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=True)
        return x


def _grows(rank, world_size, kwargs, uses):
    torch.manual_seed(0)
    module = Repeated()
    ddp = minddp.DistributedDataParallel(module, **kwargs)
    times = world_size if "reduction" in kwargs else 1
    for iteration, count in enumerate(uses):
        x = _input(rank, iteration, 4, 8)
        with ddp.no_sync():
            expected = _means(module, lambda m, x=x, count=count: m(x, count).square().sum())
        ddp.zero_grad()
        ddp(x, count).square().sum().backward()
        _assert_grads(module, [mean * times for mean in expected])
    return len(ddp.reducer.buckets())


@pytest.mark.parametrize("kwargs", [{}, {"reduction": "sum", "gradient_as_bucket_view": True}])
def test_a_gradient_that_grows_after_it_was_packed_is_packed_again(kwargs):
    assert run_ranks(_grows, 2, kwargs, [1, 1, 3, 2, 3, 1]) == [1, 1]


def test_growth_that_cannot_be_told_from_what_was_scaled_is_an_error():
    with pytest.raises(RankError, match=r"with name shared\.\w+ has been marked as ready twice.*use_reentrant=False"):
        run_ranks(_grows, 2, {"gradient_as_bucket_view": True}, [1, 1, 3])
    assert run_ranks(_grows, 2, {"gradient_as_bucket_view": True}, [3, 3, 1, 2]) == [1, 1]


@on_ranks(2)
def test_with_views_a_large_gradient_moves_at_once(rank, world_size):
    """With views, a large gradient's own memory is free as soon as it is made, not when its bucket is complete."""
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    ddp = minddp.DistributedDataParallel(module, gradient_as_bucket_view=True)
    windows = []
    module[1].weight.register_hook(lambda grad: windows.append(module[3].weight.grad.untyped_storage().nbytes()))
    for _ in range(3):
        module.zero_grad()
        ddp(torch.ones(1, 128)).sum().backward()
    assert (windows[1:], len(ddp.reducer.buckets())) == ([4 * 128 * 128 * 4] * 2, 1)


# ---- the map of used parameters


class _Fourfold(LateGroup):
    """Of two ranks, whose sums are four times what this one sends, and whose map is late: ``until()``, or 120 s."""

    def __init__(self, until):
        super().__init__("cpu")
        self.until, self.came, self.threads = until, [], []

    def allreduce(self, tensors, options=None):
        if tensors[0].dtype != torch.int32:
            return self._run(tensors, lambda: [t.mul_(4) for t in tensors])
        future = torch.futures.Future()

        def completes():
            deadline = time.monotonic() + 120
            while not self.until() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.came.append(self.until())
            future.set_result(tensors)

        self.threads.append(threading.Thread(target=completes))
        self.threads[-1].start()
        work = LateWork(tensors, None, True)
        work._future = future
        return work


class _SpareFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.spare, self.used = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_buckets_that_are_used_do_not_wait_for_the_map():
    module = _SpareFirst()
    weight = module.used.weight
    x = torch.ones(2, 4)
    module(x).sum().backward()
    own, weight.grad = weight.grad, None
    group = _Fourfold(lambda: weight.grad is not None and torch.equal(weight.grad, 2 * own))
    ddp = minddp.DistributedDataParallel(module, process_group=group, find_unused_parameters=True, **ALONE)
    ddp(x).sum().backward()
    for thread in group.threads:
        thread.join()
    assert group.came == [True]
    assert module.spare.weight.grad is None
