"""The shared-memory backend against Gloo, and against the same arithmetic done in one process."""

from __future__ import annotations

import functools
import operator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import minddp.shm
from tests.on_ranks import on_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# Below and above what goes in one tick, in one chunk, and through several; odd ones among them.
SIZES = [0, 1, 7, 1023, 8192, 8193, 70_001, 300_007]


def shm_group() -> dist.ProcessGroup:
    return dist.new_group(backend="shm")


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank ``rank``'s input: every rank can make every other's."""
    generator = torch.Generator().manual_seed(1000 * rank + numel % 977)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator, dtype=torch.uint8).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 0 if dtype == torch.uint8 else -7
        return torch.randint(low, 8, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)


OPERATIONS = {
    dist.ReduceOp.SUM: operator.add,
    dist.ReduceOp.PRODUCT: operator.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]


def reduce_here(inputs: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """The reduction in the order of ranks; half types in float32, rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        inputs = [value.to(torch.uint8) for value in inputs]
        if op == dist.ReduceOp.SUM:
            op = dist.ReduceOp.MAX
    wide = [value.float() if dtype in (torch.float16, torch.bfloat16) else value for value in inputs]
    if op == dist.ReduceOp.AVG:
        return (functools.reduce(operator.add, wide) / len(wide)).to(dtype)
    return functools.reduce(OPERATIONS[op], wide).to(dtype)


def supported() -> list[tuple[torch.dtype, dist.ReduceOp.RedOpType]]:
    arithmetic = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT]
    ordered = [*arithmetic, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    pairs = [(dtype, op) for dtype in FLOATS for op in [*ordered, dist.ReduceOp.AVG]]
    pairs += [(dtype, op) for dtype in COMPLEX for op in [*arithmetic, dist.ReduceOp.AVG]]
    return pairs + [(dtype, op) for dtype in [*INTEGERS, torch.bool] for op in [*ordered, *BITWISE]]


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """As a reducer calls it: complex tensors arrive as such (``dist.all_reduce`` views them as real)."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()


@on_ranks(2, 3)
def test_allreduce_of_every_type_and_operation(rank: int, world_size: int) -> None:
    group = shm_group()
    for dtype, op in supported():
        for numel in SIZES:
            inputs = [values(r, numel, dtype) for r in range(world_size)]
            tensor = inputs[rank].clone()
            all_reduce(tensor, op, group)
            expected = reduce_here(inputs, op)
            if dtype.is_complex and op == dist.ReduceOp.PRODUCT:
                torch.testing.assert_close(tensor, expected)
            else:
                assert torch.equal(tensor, expected), (dtype, op, numel)


@on_ranks(2)
def test_two_ranks_get_gloos_bits(rank: int, world_size: int) -> None:
    group = shm_group()
    for dtype in [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.int8]:
        for op in [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]:
            for numel in (1, 1023, 70_001):
                ours = values(rank, numel, dtype)
                gloo = ours.clone()
                dist.all_reduce(ours, op, group=group)
                dist.all_reduce(gloo, op)
                assert torch.equal(ours, gloo), (dtype, op, numel)


@on_ranks(2, 3)
def test_minimum_and_maximum_of_signed_zeros_and_nans(rank: int, world_size: int) -> None:
    """A NaN wins, in sums too, -0 is less than +0: wherever they are, on any path (flat, in pieces, in place)."""
    group = shm_group()
    nan, inf = float("nan"), float("inf")
    choices = torch.tensor([-0.0, 0.0, nan, -inf, inf, 1.0, -1.0], dtype=torch.float64)
    places = torch.cartesian_prod(*[torch.arange(len(choices))] * world_size)  # every mixture
    for dtype in FLOATS:
        for repeat in (1, 40_000 // len(places) + 1):
            columns = choices[places].to(dtype).repeat(repeat, 1)
            zeros_there, negative_there = columns == 0, torch.signbit(columns)
            for result in check_paths(columns[:, rank].contiguous(), dist.ReduceOp.SUM, group):
                assert torch.equal(result.isnan(), columns.double().sum(1).isnan()), dtype
            for op, extreme, negative in (
                (dist.ReduceOp.MIN, columns.amin(1), (negative_there & zeros_there).any(1)),
                (dist.ReduceOp.MAX, columns.amax(1), (negative_there | ~zeros_there).all(1)),
            ):
                for result in check_paths(columns[:, rank].contiguous(), op, group):
                    assert torch.equal(result.isnan(), columns.isnan().any(1)), (dtype, op)
                    numbers = ~result.isnan()
                    assert torch.equal(result[numbers], extreme[numbers]), (dtype, op)
                    zeros = result == 0
                    assert torch.equal(torch.signbit(result)[zeros], negative[zeros]), (dtype, op)


def check_paths(mine: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> list[torch.Tensor]:
    private, shared = mine.clone(), minddp.shm.empty(mine.numel(), dtype=mine.dtype, group=group).copy_(mine)
    dist.all_reduce(private, op, group=group)
    dist.all_reduce(shared, op, group=group)
    world_size = dist.get_world_size(group)
    scattered = torch.empty_like(mine)
    dist.reduce_scatter_tensor(scattered, mine.repeat(world_size), op, group=group)
    bits = [torch.empty_like(private.view(torch.uint8)) for _ in range(world_size)]
    dist.all_gather(bits, private.view(torch.uint8), group=group)
    assert all(torch.equal(bits[0], other) for other in bits)  # a NaN's, too
    return [private, shared, scattered]


@on_ranks(2, 3)
def test_sums_are_scattered(rank: int, world_size: int) -> None:
    """Gloo has none of it; ``test_shm_random`` compares the other collectives with Gloo's."""
    group = shm_group()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        for numel in (0, 1, 7, 8192, 70_001, 300_007):
            check_reduce_scatter(rank, world_size, values(rank, numel, dtype), group)


def check_reduce_scatter(rank: int, world_size: int, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole = torch.cat([mine + i for i in range(world_size)])
    every = [
        torch.cat([values(r, mine.numel(), mine.dtype) + i for i in range(world_size)]) for r in range(world_size)
    ]
    expected = reduce_here(every, dist.ReduceOp.SUM).chunk(world_size)[rank] if mine.numel() else mine
    output = torch.empty_like(mine)
    dist.reduce_scatter_tensor(output, whole, group=group)
    assert torch.equal(output, expected)
    output = torch.empty_like(mine)
    dist.reduce_scatter(output, [mine + i for i in range(world_size)], group=group)
    assert torch.equal(output, expected)


@on_ranks(2, 3)
def test_uneven_sizes(rank: int, world_size: int) -> None:
    group = shm_group()
    sizes = [3, 0, 100_001][:world_size]
    outputs = [torch.empty(size) for size in sizes]
    dist.all_gather(outputs, torch.full((sizes[rank],), float(rank)), group=group)
    for r, output in enumerate(outputs):
        assert torch.equal(output, torch.full((sizes[r],), float(r)))
    # Rank i sends (i + 1) * (j + 1) rows of width 2 to rank j, many of them once.
    for factor in (1, 40_000):
        rows_in = [factor * (rank + 1) * (j + 1) for j in range(world_size)]
        rows_out = [factor * (i + 1) * (rank + 1) for i in range(world_size)]
        source = torch.cat([torch.full((rows, 2), 10.0 * rank + j) for j, rows in enumerate(rows_in)])
        output = torch.empty(sum(rows_out), 2)
        dist.all_to_all_single(output, source, rows_out, rows_in, group=group)
        expected = torch.cat([torch.full((rows, 2), 10.0 * i + rank) for i, rows in enumerate(rows_out)])
        assert torch.equal(output, expected)
    pieces = [torch.full((10 * rank + j,), float(rank)) for j in range(world_size)]
    received = [torch.empty(10 * i + rank) for i in range(world_size)]
    dist.all_to_all(received, pieces, group=group)
    assert [float(t.sum()) for t in received] == [i * (10.0 * i + rank) for i in range(world_size)]


@on_ranks(2, 3)
def test_strides_objects_and_coalescing(rank: int, world_size: int) -> None:
    group = shm_group()
    for numel in (8, 300_000):  # transposed, and every other element
        base = torch.arange(2.0 * numel).view(2, numel) * (rank + 1)
        total = sum(range(1, world_size + 1))
        view = base.t()
        dist.all_reduce(view, group=group)
        assert torch.equal(base, torch.arange(2.0 * numel).view(2, numel) * total)
        base = torch.full((2 * numel,), float(rank))
        dist.broadcast(base[::2], 1, group=group)
        assert torch.equal(base[::2], torch.ones(numel))
        assert torch.equal(base[1::2], torch.full((numel,), float(rank)))
    outputs = [torch.empty(6, 4).t() for _ in range(world_size)]
    dist.all_gather(outputs, torch.full((4, 6), float(rank)), group=group)
    assert [float(t[2, 3]) for t in outputs] == [float(r) for r in range(world_size)]
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)).t())
    dist.broadcast(parameter, 0, group=group)
    assert float(parameter.sum()) == 0.0
    objects: list = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(world_size)]
    with dist._coalescing_manager(group):
        many = [torch.full((5 + i,), float(rank)) for i in range(3)]
        for tensor in many:
            dist.all_reduce(tensor, group=group)
    assert [float(t[0]) for t in many] == [float(sum(range(world_size)))] * 3


@on_ranks(2, 3)
def test_messages(rank: int, world_size: int) -> None:
    group = shm_group()
    to, back = (rank + 1) % world_size, (rank - 1) % world_size
    for numel in (0, 1, 500_000):
        out, into = torch.full((numel,), float(rank)), torch.empty(numel)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, to, group), dist.P2POp(dist.irecv, into, back, group)]
        )
        for work in works:
            work.wait()
        assert torch.equal(into, torch.full((numel,), float(back)))
    check_any_source(rank, world_size, group)
    check_many_messages(rank, group)


def check_any_source(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, group)
        return
    senders = []
    for _ in range(world_size - 1):
        tensor = torch.zeros(1)
        senders.append(dist.recv(tensor, None, group))
        assert float(tensor) == senders[-1]
    assert sorted(senders) == list(range(1, world_size))


def check_many_messages(rank: int, group: dist.ProcessGroup) -> None:
    """Of one tag, in order: more than the table holds, so the sender waits for a receiver that begins late."""
    if rank == 0:
        for i in range(300):
            dist.send(torch.tensor([i]), 1, group)
    if rank == 1:
        receives = [torch.zeros(1, dtype=torch.int64) for _ in range(300)]
        for work in [dist.irecv(tensor, 0, group) for tensor in receives]:
            work.wait()
        assert [int(tensor) for tensor in receives] == list(range(300))


@on_ranks(2, 3)
def test_asynchronous_works_and_futures(rank: int, world_size: int) -> None:
    group = shm_group()
    tensors = [torch.full((n,), 1.0) for n in (10, 200_000, 10, 50_000)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    assert [float(tensor[-1]) for tensor in tensors] == [float(world_size)] * 4
    future = dist.all_reduce(tensors[0], group=group, async_op=True).get_future()
    assert float(future.then(lambda done: done.value()[0] / 2).wait()[0]) == world_size**2 / 2
    check_callbacks_that_block(world_size, group)


def check_callbacks_that_block(world_size: int, group: dist.ProcessGroup) -> None:
    """A callback starts a collective and waits for it, as PowerSGD's does; several at a time."""

    def again(done: torch.futures.Future) -> torch.Tensor:
        second = dist.all_reduce(done.value()[0], group=group, async_op=True)
        return second.get_future().wait()[0]

    # All are submitted before the first is done, with sizes of their own: were the second collectives not
    # to run in the same order on all ranks, they would not fit each other.
    for _ in range(20):
        tensors = [torch.ones(1000 + i) for i in range(4)]
        futures = [dist.all_reduce(t, group=group, async_op=True).get_future().then(again) for t in tensors]
        assert [float(future.wait()[-1]) for future in futures] == [float(world_size**2)] * 4
    first = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    later = []
    waits_for_later = first.get_future().then(lambda _: later[0].wait() if later else None)
    later.append(dist.all_reduce(torch.ones(3), group=group, async_op=True))
    waits_for_later.wait()
    assert later[0].wait()


@on_ranks(2, 3)
def test_several_groups(rank: int, world_size: int) -> None:
    """Groups of their own: a subgroup, and two over all ranks used in another order by each rank."""
    pairs = [dist.new_group([0, r], backend="shm") for r in range(1, world_size)]
    for r, pair in enumerate(pairs, start=1):
        if rank in (0, r):
            tensor = torch.full((40_000,), float(rank))
            dist.all_reduce(tensor, group=pair)
            assert torch.equal(tensor, torch.full((40_000,), float(r)))
    groups = [shm_group(), shm_group()]
    tensors = [torch.ones(100_000), torch.full((100_000,), 2.0)]
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
    for i in order:
        works[i].wait()
    assert [float(tensor[0]) for tensor in tensors] == [1.0 * world_size, 2.0 * world_size]


@on_ranks(2, 3)
def test_tensors_in_shared_memory(rank: int, world_size: int) -> None:
    group = shm_group()
    for dtype in (torch.float32, torch.float16, torch.complex128, torch.uint8):
        for numel in (1, 8193, 300_007):
            inputs = [values(r, numel, dtype) for r in range(world_size)]
            shared = minddp.shm.empty(numel, dtype=dtype, group=group)
            private = inputs[rank].clone()
            shared.copy_(private)
            dist.all_reduce(shared, group=group)
            dist.all_reduce(private, group=group)
            assert torch.equal(shared, private)
            assert torch.equal(shared, reduce_here(inputs, dist.ReduceOp.SUM))
    check_views_and_mixtures(rank, world_size, group)
    check_lifetime(group)


def check_views_and_mixtures(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    """Shared on some ranks only, and at other offsets on each."""
    kept = [minddp.shm.empty(1000 * (rank + 1), group=group)]
    total = float(sum(range(1, world_size + 1)))
    shared = minddp.shm.empty(3, 50_000, group=group)
    for tensor in (shared[1], shared[0, 5 + rank : 40_005 + rank], shared if rank == 0 else torch.empty(3, 50_000)):
        shared.zero_()
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full_like(tensor, total))
    assert minddp.shm.is_shared(shared, group)
    assert minddp.shm.is_shared(shared[1], group)
    assert not minddp.shm.is_shared(torch.empty(3), group)
    assert not minddp.shm.is_shared(shared.t(), group)
    assert kept[0].shape == (1000 * (rank + 1),)


def check_lifetime(group: dist.ProcessGroup) -> None:
    """Memory is used again once its tensor is gone, and lives on when its group is gone."""
    first = minddp.shm.empty(100_000, group=group)
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    survivor = minddp.shm.empty(100_000, group=group)
    assert survivor.data_ptr() == address
    survivor.fill_(7.0)
    dist.destroy_process_group(group)
    assert float(survivor.sum()) == 700_000.0


@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent(rank: int, world_size: int) -> None:
    group = shm_group()
    with pytest.raises(TypeError, match="BAND of Float"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=group)
    with pytest.raises(TypeError, match="AVG of Int"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
    with pytest.raises(ValueError, match="must have the same number of elements, got 3 and 4"):
        dist.all_gather([torch.ones(4)] * world_size, torch.ones(3), group=group)
    with pytest.raises(ValueError, match="add up to the first dimension"):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2], group=group)
    with pytest.raises(ValueError, match="does not use the 'shm' backend, but 'gloo'"):
        minddp.shm.empty(3)
    for dtype in (torch.quint8, torch.qint32, torch.quint4x2, 3):
        with pytest.raises(TypeError, match="dtype must be a torch.dtype that is not quantized"):
            minddp.shm.empty(3, dtype=dtype, group=group)
    assert minddp.shm.empty(3, dtype=torch.float8_e4m3fn, group=group).dtype is torch.float8_e4m3fn
    for sizes in ((-3,), (-3, -3), (2, -1)):
        with pytest.raises(ValueError, match="a size must not be negative"):
            minddp.shm.empty(*sizes, group=group)
    for sizes in ((2**62 + 1,), (2**61,), (2**40,), (2**40, 2**40), (2**63 - 1,)):
        with pytest.raises(MemoryError, match="can be addressed|no room for"):
            minddp.shm.empty(*sizes, group=group)
    # None of these has touched the group.
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), float(world_size)))


@on_ranks(1, backend="shm")
def test_world_of_one(rank: int, world_size: int) -> None:
    tensor = torch.arange(5.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(tensor, op)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    output = torch.empty(5)
    for call in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
        call(output.zero_(), tensor)
        assert torch.equal(output, torch.arange(5.0))
    dist.gather(tensor, [output.zero_()], 0)
    assert torch.equal(output, torch.arange(5.0))
    dist.scatter(output.zero_(), [tensor], 0)
    assert torch.equal(output, torch.arange(5.0))
    dist.barrier()


def train(ddp_class, group: dist.ProcessGroup, rank: int, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    ddp = ddp_class(model, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_training_ends_with_gloos_weights(rank: int, world_size: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    group = shm_group()
    expected = train(DistributedDataParallel, dist.group.WORLD, rank)
    for ddp_class in (DistributedDataParallel, minddp.DistributedDataParallel):
        for views in (False, True):
            weights = train(ddp_class, group, rank, gradient_as_bucket_view=views)
            assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True)), ddp_class


@on_ranks(2)
def test_buckets_lie_in_the_transports_memory(rank: int, world_size: int) -> None:
    groups = {True: shm_group(), False: dist.group.WORLD}
    for shared, group in groups.items():
        ddp = minddp.DistributedDataParallel(
            torch.nn.Linear(30, 40), process_group=group, gradient_as_bucket_view=True
        )
        ddp(torch.randn(5, 30)).sum().backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            assert minddp.shm.is_shared(parameter.grad, groups[True]) is shared


@on_ranks(2)
def test_wait_with_a_limit_leaves_the_work_going(rank: int, world_size: int) -> None:
    group = shm_group()
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="waited for 50 ms and is not done"):
            work.wait(timedelta(milliseconds=50))
        dist.send(torch.ones(1), 1)  # by Gloo: now rank 1 may come
        assert work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), 2.0))
