"""The shared-memory backend against Gloo, and against the same arithmetic done in one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
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
    """A NaN wins, in sums too, -0 is less than +0: wherever they are, on either path (flat, in pieces)."""
    group = shm_group()
    nan, inf = float("nan"), float("inf")
    choices = torch.tensor([-0.0, 0.0, nan, -inf, inf, 1.0, -1.0], dtype=torch.float64)
    places = torch.cartesian_prod(*[torch.arange(len(choices))] * world_size)  # every mixture
    for dtype in FLOATS:
        for repeat in (1, 40_000 // len(places) + 1):
            columns = choices[places].to(dtype).repeat(repeat, 1)
            zeros_there, negative_there = columns == 0, torch.signbit(columns)
            mine = columns[:, rank].contiguous()
            total = everyones(mine, dist.ReduceOp.SUM, group)
            assert torch.equal(total.isnan(), columns.double().sum(1).isnan()), dtype
            for op, extreme, negative in (
                (dist.ReduceOp.MIN, columns.amin(1), (negative_there & zeros_there).any(1)),
                (dist.ReduceOp.MAX, columns.amax(1), (negative_there | ~zeros_there).all(1)),
            ):
                result = everyones(mine, op, group)
                assert torch.equal(result.isnan(), columns.isnan().any(1)), (dtype, op)
                numbers = ~result.isnan()
                assert torch.equal(result[numbers], extreme[numbers]), (dtype, op)
                zeros = result == 0
                assert torch.equal(torch.signbit(result)[zeros], negative[zeros]), (dtype, op)


def everyones(mine: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> torch.Tensor:
    """The reduction, whose bits are the same on all ranks, a NaN's too."""
    result = mine.clone()
    dist.all_reduce(result, op, group=group)
    bits = [torch.empty_like(result.view(torch.uint8)) for _ in range(dist.get_world_size(group))]
    dist.all_gather(bits, result.view(torch.uint8), group=group)
    assert all(torch.equal(bits[0], other) for other in bits)
    return result


def sparse(rank: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, 2.0]), (5,))


def messages(group: dist.ProcessGroup, rank: int, world_size: int) -> torch.Tensor:
    received = torch.empty(3)
    send = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world_size, group)
    sender = dist.recv(received, None, group)
    send.wait()
    return received * 10 + sender


def in_place(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> torch.Tensor:
    call(tensor)
    return tensor


def into(call: Callable[[torch.Tensor, torch.Tensor], Any], size: int, tensor: torch.Tensor) -> torch.Tensor:
    output = torch.zeros(size)
    call(output, tensor)
    return output


def listed(call: Callable[[list[torch.Tensor], Any], Any], sizes: list[int], given: Any) -> torch.Tensor:
    outputs = [torch.zeros(size) for size in sizes]
    call(outputs, given)
    return torch.cat(outputs)


def coalesced(group: dist.ProcessGroup, dtypes: list[torch.dtype]) -> torch.Tensor:
    tensors = [torch.full((2 + i,), 2, dtype=dtype) for i, dtype in enumerate(dtypes)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return torch.cat([tensor.double() for tensor in tensors])


OTHERS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda g, t, r, n: in_place(lambda x: dist.broadcast(x, 1, g), t),
    "broadcast of every other element": lambda g, t, r, n: in_place(lambda x: dist.broadcast(x[::2], 1, g), t),
    "reduce to one": lambda g, t, r, n: in_place(lambda x: dist.reduce(x, 0, group=g), t) * (r == 0),
    "all_gather": lambda g, t, r, n: listed(lambda o, x: dist.all_gather(o, x, g), [6] * n, t),
    "all_gather, uneven": lambda g, t, r, n: listed(lambda o, x: dist.all_gather(o, x, g), [3, 0, 5][:n], t[:3]),
    "all_gather_into_tensor": lambda g, t, r, n: into(lambda o, x: dist.all_gather_into_tensor(o, x, g), 6 * n, t),
    "gather": lambda g, t, r, n: listed(
        lambda o, x: dist.gather(x, o if r == 0 else None, 0, g), [6] * n if r == 0 else [1], t
    ),
    "scatter": lambda g, t, r, n: into(
        lambda o, x: dist.scatter(o, list(x.chunk(n)) if r == 0 else None, 0, g), 6 // n, t
    ),
    "reduce_scatter": lambda g, t, r, n: into(
        lambda o, x: dist.reduce_scatter(o, list(x.chunk(n)), group=g), 6 // n, t
    ),
    "reduce_scatter_tensor": lambda g, t, r, n: into(
        lambda o, x: dist.reduce_scatter_tensor(o, x, group=g), 6 // n, t
    ),
    "all_to_all_single": lambda g, t, r, n: into(lambda o, x: dist.all_to_all_single(o, x, group=g), 6, t),
    "all_to_all": lambda g, t, r, n: listed(lambda o, x: dist.all_to_all(o, list(x.chunk(n)), g), [6 // n] * n, t),
    "all_reduce of a sparse tensor": lambda g, t, r, n: in_place(lambda x: dist.all_reduce(x, group=g), sparse(r)),
    "all_reduce, coalesced": lambda g, t, r, n: coalesced(g, [torch.float32, torch.float32]),
    "all_reduce, coalesced, of several types": lambda g, t, r, n: coalesced(g, [torch.float32, torch.int64]),
    "messages": lambda g, t, r, n: messages(g, r, n),
    "all_reduce of nothing": lambda g, t, r, n: g.allreduce([]).wait(),
}


def answer(call: Callable[..., Any], group: dist.ProcessGroup, rank: int, world_size: int) -> Any:
    """What comes of it: a tensor, or the error's kind and words."""
    tensor = torch.arange(6.0) + 10 * rank
    try:
        result = call(group, tensor, rank, world_size)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return result.to_dense().tolist() if isinstance(result, torch.Tensor) else result


@on_ranks(2, 3)
def test_every_other_call_is_gloos(rank: int, world_size: int) -> None:
    """The same numbers, or the same error."""
    group, gloo = shm_group(), dist.new_group(backend="gloo")
    for name, call in OTHERS.items():
        expected, found = (answer(call, each, rank, world_size) for each in (gloo, group))
        assert found == expected, name
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), float(world_size)))


@on_ranks(2, 3)
def test_strides_objects_and_coalescing(rank: int, world_size: int) -> None:
    group = shm_group()
    for numel in (8, 300_000):  # transposed, and every other element
        base = torch.arange(2.0 * numel).view(2, numel) * (rank + 1)
        total = sum(range(1, world_size + 1))
        view = base.t()
        dist.all_reduce(view, group=group)
        assert torch.equal(base, torch.arange(2.0 * numel).view(2, numel) * total)
        base = torch.full((2 * numel,), float(rank + 1))
        dist.all_reduce(base[::2], group=group)
        assert torch.equal(base[::2], torch.full((numel,), float(total)))
        assert torch.equal(base[1::2], torch.full((numel,), float(rank + 1)))
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)).t())
    dist.all_reduce(parameter, group=group)
    assert float(parameter.sum()) == 6.0 * sum(range(world_size))
    objects: list = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(world_size)]
    with dist._coalescing_manager(group):
        many = [torch.full((5 + i,), float(rank)) for i in range(3)]
        for tensor in many:
            dist.all_reduce(tensor, group=group)
    assert [float(t[0]) for t in many] == [float(sum(range(world_size)))] * 3


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


@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent(rank: int, world_size: int) -> None:
    group = shm_group()
    with pytest.raises(TypeError, match="BAND of Float"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=group)
    with pytest.raises(TypeError, match="AVG of Int"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
    with pytest.raises(TypeError, match="PREMUL_SUM of Float"):
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0), group=group)
    with pytest.raises(TypeError, match="SUM of Float8_e4m3fn"):
        dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn), group=group)
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
    output = torch.empty(5)
    dist.all_gather_into_tensor(output, tensor)
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
