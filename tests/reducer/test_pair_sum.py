"""Two ranks over Gloo: small buckets travel in one message each way, and both ranks add."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import minddp
import minddp.shm
from minddp import _C
from minddp.testing import RankError, run_ranks
from tests.ranks.own_group import OwnGroup

TORCH = nn.parallel.DistributedDataParallel
OURS = minddp.DistributedDataParallel
NOBODY, BOTH, GLOO = [], ["gloo:all_gather", "gloo:all_reduce"], ["gloo:all_reduce"]
LEARNED = 2  # iterations until both ranks know that neither has a hook


def _net(size=16, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 3)).to(dtype)


def _x(rank, i, size=16, dtype=torch.float32):
    return torch.randn(4, size, generator=torch.Generator().manual_seed(10 * i + rank)).to(dtype)


def _collectives(step):
    """Names of the group's collectives in ``step()``, each once for each time."""
    with torch.autograd.profiler.profile() as profile:
        step()
        # Gloo notes an end on its own thread, which may come after whoever waited has gone on.
        dist.barrier()
        time.sleep(0.1)
    return sorted(event.name for event in profile.function_events if event.name.startswith("gloo:all_"))


def _steps(ddp, rank, count=5, size=16, dtype=torch.float32):
    """Collectives of each iteration's backward, and all gradients."""
    seen, gradients = [], []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for i in range(count):
        optimizer.zero_grad()
        loss = ddp(_x(rank, i, size, dtype)).square().sum()
        seen.append(_collectives(loss.backward))
        gradients += [p.grad.clone() for p in ddp.module.parameters()]
        optimizer.step()
    return seen, gradients


def _bits(tensors):
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.view(kinds[t.element_size()]) for t in tensors]


def _assert_same_bits(ours, theirs):
    for one, other in zip(_bits(ours), _bits(theirs), strict=True):
        assert torch.equal(one, other)


def _assert_mean(ddp, x, i):
    """Over the losses of iteration ``i``."""
    lone = copy.deepcopy(ddp.module)
    lone.zero_grad()
    sum(lone(x(rank, i)).square().sum() for rank in range(2)).backward()
    for p, q in zip(ddp.module.parameters(), lone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad / 2)


# ---- which way


def _two_ways(rank, world_size, views, dtype):
    kwargs = {"gradient_as_bucket_view": views}
    ours, mine = _steps(OURS(_net(dtype=dtype), **kwargs), rank, dtype=dtype)
    theirs, expected = _steps(TORCH(_net(dtype=dtype), **kwargs), rank, dtype=dtype)
    assert theirs == [GLOO] * 5
    assert ours == [GLOO] * LEARNED + [BOTH] * 3, ours
    _assert_same_bits(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("views", [False, True])
def test_a_small_bucket_is_gathered_and_added_with_the_bits_of_torchs(views, dtype):
    run_ranks(_two_ways, 2, views, dtype)


def _groups_own(rank, world_size, size, dtype):
    ours, mine = _steps(OURS(_net(size, dtype)), rank, size=size, dtype=dtype)
    _, expected = _steps(TORCH(_net(size, dtype)), rank, size=size, dtype=dtype)
    assert ours[LEARNED:] == [GLOO] * 3, ours
    if world_size == 2:  # else a sum depends on where in its buffer a gradient lies
        _assert_same_bits(mine, expected)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("ranks", "size", "dtype"),
    [(2, 600, torch.float32), (2, 16, torch.bfloat16), (3, 16, torch.float32)],
    ids=["large", "half", "three_ranks"],
)
def test_large_buckets_half_precision_and_three_ranks_are_the_groups_own(ranks, size, dtype):
    run_ranks(_groups_own, ranks, size, dtype)


def _over_shared_memory(rank, world_size):
    group = dist.new_group(backend="shm")
    ours, _ = _steps(OURS(_net(), process_group=group), rank)
    assert ours == [NOBODY] * 5


def test_a_group_on_shared_memory_is_asked_nothing():
    run_ranks(_over_shared_memory, 2)


# ---- what it adds


def _odd_values(rank, world_size, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    one = [0.0, -0.0, -0.0, float("inf"), float("inf"), float("nan"), tiny, tiny / 8, 1.0, torch.finfo(dtype).max]
    other = [-0.0, -0.0, 0.0, float("-inf"), 1.0, 2.0, -tiny / 2, tiny / 8, 1e-30, torch.finfo(dtype).max]
    values = torch.tensor([one, other][rank], dtype=dtype)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10, dtype=dtype))

        def forward(self):
            return self.weight * values

    found = []
    for ddp in (OURS(Scale()), TORCH(Scale())):
        for _ in range(LEARNED + 1):
            ddp.zero_grad()
            ddp().sum().backward()
        found.append(ddp.module.weight.grad)
    assert torch.equal(found[0].isnan(), found[1].isnan())
    _assert_same_bits([found[0].nan_to_num(7.0)], [found[1].nan_to_num(7.0)])
    everyones = [torch.empty_like(found[0]) for _ in range(2)]
    dist.all_gather(everyones, found[0])
    _assert_same_bits(everyones[:1], everyones[1:])  # NaNs too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_infinities_nans_and_denormals_are_added_as_by_torchs(dtype):
    run_ranks(_odd_values, 2, dtype)


# ---- beside other features


def _modes(rank, world_size, kwargs, only_ours):
    def steps(ddp):
        losses = []
        for i in range(6):
            ddp.zero_grad()
            if i == 4:
                with ddp.no_sync():
                    ddp(_x(rank, 40)).square().sum().backward()
            if isinstance(ddp, OURS) and only_ours.get("reduction") == "weighted":
                ddp.add_weight(1.0)
            ddp(_x(rank, i)).square().sum().backward()
            losses += [p.grad.clone() for p in ddp.module.parameters()]
        return losses

    ours = OURS(_net(), **kwargs, **only_ours)
    mine = steps(ours)
    seen = _collectives(lambda: ours(_x(rank, 9)).sum().backward()) if not only_ours else BOTH
    assert ("gloo:all_gather" in seen) != ("find_unused_parameters" in kwargs), seen
    for one, other in zip(mine, steps(TORCH(_net(), **kwargs)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kwargs", "only_ours"),
    [
        ({"find_unused_parameters": True}, {}),
        ({"static_graph": True}, {}),
        ({"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True}, {}),
        ({}, {"check_finite": "raise"}),
        ({}, {"lazy_bucket_allocation": True}),
        ({}, {"reduction": "weighted"}),
    ],
    ids=["unused", "static", "views", "finite", "lazy", "weighted"],
)
def test_other_modes_get_the_numbers_of_torchs(kwargs, only_ours):
    run_ranks(_modes, 2, kwargs, only_ours)


def _joins(rank, world_size):
    found = []
    for ddp_class in (OURS, TORCH):
        ddp = ddp_class(_net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for i in range(3 + 3 * rank):
                optimizer.zero_grad()
                ddp(_x(rank, i)).square().sum().backward()
                optimizer.step()
        for i in range(3):  # and all together again
            optimizer.zero_grad()
            ddp(_x(rank, 10 + i)).square().sum().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in ddp.module.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_rank_out_of_data_adds_zeros():
    run_ranks(_joins, 2)


def _hooks_on_one_rank(rank, world_size):
    found = []
    for ddp_class in (OURS, TORCH):
        ddp = ddp_class(_net())
        if rank == 0:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        seen, gradients = _steps(ddp, rank)
        assert seen[LEARNED:] == [GLOO] * 3, seen
        found.append(gradients)
    _assert_same_bits(*found)


def test_a_hook_on_one_rank_alone_meets_the_others_all_reduce():
    run_ranks(_hooks_on_one_rank, 2)


def _hook_in_a_thread(rank, world_size):
    """Its all-reduces are called when backward may have reached its end, and other ranks' sooner."""
    found = []
    for ddp_class in (OURS, TORCH):
        with ThreadPoolExecutor(1) as thread:

            def hook(_, bucket, thread=thread):
                future, buffer = torch.futures.Future(), bucket.buffer()

                def send():
                    time.sleep(0.05 * rank)
                    dist.all_reduce(buffer)
                    future.set_result(buffer.div_(world_size))

                thread.submit(send)
                time.sleep(0.1 * (rank == 0))
                return future

            ddp = ddp_class(_net())
            ddp.register_comm_hook(None, hook)
            found.append(_steps(ddp, rank)[1])
    _assert_same_bits(*found)


def test_a_hook_that_calls_the_group_in_a_thread_meets_the_others():
    run_ranks(_hook_in_a_thread, 2)


def _hook_later(rank, world_size):
    ddp = OURS(_net())
    _steps(ddp, rank)
    expected = _steps(copy.deepcopy(ddp), rank, count=2)[1]
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    seen, gradients = _steps(ddp, rank, count=2)
    assert seen == [GLOO] * 2
    _assert_same_bits(gradients, expected)


def test_a_hook_that_all_ranks_register_later_reduces_from_then_on():
    run_ranks(_hook_later, 2)


def _copies_on_one_rank(rank, world_size):
    found = []
    for ddp_class in (OURS, TORCH):
        ddp = ddp_class(_net(), find_unused_parameters=True)
        gradients = _steps(ddp, rank, count=3)[1]
        if rank == 0:
            ddp = copy.deepcopy(ddp)
        found.append(gradients + _steps(ddp, rank, count=3)[1])
    _assert_same_bits(*found)


def test_a_copy_on_one_rank_alone_that_looks_for_unused_parameters_asks_nothing():
    run_ranks(_copies_on_one_rank, 2)


def _own_group(rank, world_size):
    group = OwnGroup("own")
    groups = dist.distributed_c10d._world.pg_group_ranks
    groups[group] = {r: r for r in range(world_size)}
    group._set_group_name("own")
    try:
        assert _C.is_gloo_pair(group)
        assert OURS(_net(), process_group=group, init_sync=False).reducer._pair is None
        assert OURS(_net(), init_sync=False).reducer._pair is not None
    finally:
        dist.barrier()
        del groups[group]


def test_a_process_group_of_the_programs_own_class_reduces_by_itself():
    run_ranks(_own_group, 2)


def _defaults(rank, world_size):
    net, ddp = _net(), OURS(_net())
    with torch.device("meta"):
        inside = OURS(net)
    torch.set_default_dtype([torch.float32, torch.float64][rank])
    try:
        seen = [_steps(wrapper, rank)[0][LEARNED:] for wrapper in (inside, ddp)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [[BOTH] * 3] * 2


def test_other_default_dtypes_and_devices():
    run_ranks(_defaults, 2)


def _one_rank_reduces_otherwise(rank, world_size, by_hand):
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    ddp = OURS(_net(), process_group=group)
    _steps(ddp, rank)
    if rank == 0 and not by_hand:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    loss = ddp(_x(rank, 9)).square().sum()
    everything = torch.zeros(sum(p.numel() for p in ddp.parameters()))
    with pytest.raises(RuntimeError, match="(?i)timed out|timeout|closed"):
        if rank == 0 and by_hand:
            dist.all_reduce(everything, group=group)
        loss.backward()


@pytest.mark.parametrize("by_hand", [False, True], ids=["hook", "by_hand"])
def test_a_hook_on_one_rank_later_and_an_all_reduce_by_hand_end_with_the_groups_timeout(by_hand):
    run_ranks(_one_rank_reduces_otherwise, 2, by_hand)


def _interleaved(rank, world_size):
    """Two wrappers, and the program's own collectives between their backwards."""
    one, other = OURS(_net()), OURS(_net(24))
    for i in range(5):
        one.zero_grad()
        other.zero_grad()
        loss = one(_x(rank, i)).square().sum() + other(_x(rank, i, 24)).square().sum()
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        loss.backward()
        work.wait()
        for ddp, x in ((one, _x), (other, lambda rank, i: _x(rank, i, 24))):
            _assert_mean(ddp, x, i)


def test_two_wrappers_and_collectives_of_the_programs_own():
    run_ranks(_interleaved, 2)


def _goes_away(rank, world_size):
    ddp = OURS(_net())
    for i in range(LEARNED + 2):
        ddp.zero_grad()
        loss = ddp(_x(rank, i)).square().sum()
        if rank == 1 and i == LEARNED + 1:
            raise ValueError("no more of this")
        loss.backward()


def test_a_rank_that_raises_is_named_where_the_other_waits():
    with pytest.raises(RankError) as error:
        run_ranks(_goes_away, 2)
    assert "no more of this" in str(error.value)
    assert "rank 1" in str(error.value), error.value


def _again_after_an_error(rank, world_size):
    """Both ranks' backward raises before the question is answered, and after."""
    ddp, raises = OURS(_net()), [False]

    def maybe(_):
        if raises[0]:
            raise RuntimeError("planted")

    next(iter(ddp.module.parameters())).register_hook(maybe)
    for i in range(6):
        ddp.zero_grad()
        raises[0] = i in (1, 4)
        loss = ddp(_x(rank, i)).square().sum()
        if raises[0]:
            with pytest.raises(RuntimeError, match="planted"):
                loss.backward()
            ddp.abort_iteration()
            continue
        loss.backward()
        _assert_mean(ddp, _x, i)


def test_iterations_that_are_given_up():
    run_ranks(_again_after_an_error, 2)
