"""What the collectives return, for every dtype and form of argument; and that nothing is modified."""

import pytest
import torch
import torch.distributed as dist

from minddp import functional as F
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks

MOVED = [torch.bool, torch.int16, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.complex64]
ADDED = [
    torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64,
]  # fmt: skip


def _values(rank, dtype, rows):
    return (torch.arange(rows * 2).reshape(rows, 2) + rank).remainder(2 if dtype is torch.bool else 99).to(dtype)


def _same(actual, expected):
    """Equal in value, dtype and shape (8-bit floats cannot be compared as they are)."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.is_contiguous()
    if actual.dtype is torch.float8_e5m2:
        actual, expected = actual.float(), expected.float()
    assert torch.equal(actual, expected), (actual, expected)


def _moves(rank, size):
    for dtype in MOVED:
        everybody = [_values(r, dtype, r) for r in range(size)]
        mine, before = everybody[rank], everybody[rank].clone()
        _same(F.all_gather(mine), torch.cat(everybody))
        for part, expected in zip(F.all_gather(mine, concat=False, sizes=range(size)), everybody, strict=True):
            _same(part, expected)
        _same(F.gather(mine, 1), torch.cat(everybody) if rank == 1 else everybody[0])
        parts = F.gather(mine, 1, concat=False)
        assert [len(part) for part in parts] == (list(range(size)) if rank == 1 else [0] * size)
        _same(F.broadcast(mine if rank == 1 else None, 1), everybody[1])
        _same(F.scatter(everybody if rank == 1 else None, 1), mine)
        whole = torch.cat(everybody)
        _same(F.scatter(whole if rank == 0 else None, splits=range(size)), mine)
        _same(F.all_to_all(whole, list(range(size))), torch.cat([mine] * size))
        for part in F.all_to_all(everybody):
            _same(part, mine)
        _same(F.all_to_all(torch.cat([mine] * size)), whole)
        _same(mine, before)


def _reductions(rank, size):
    for dtype in ADDED:
        everybody = torch.stack([_values(r, dtype, size) for r in range(size)])
        mine, before = everybody[rank], everybody[rank].clone()
        expected = {"sum": everybody.sum(0, dtype=dtype), "product": everybody.prod(0, dtype=dtype)}
        if not dtype.is_complex:
            expected |= {"min": everybody.amin(0), "max": everybody.amax(0)}
        if dtype.is_floating_point or dtype.is_complex:
            expected["avg"] = expected["sum"] / size
        for op, value in expected.items():
            _same(F.all_reduce(mine, op), value)
            _same(F.all_reduce(mine.t(), op), value.t().contiguous())
            _same(F.reduce_scatter(mine, op), value[rank : rank + 1])
            _same(F.reduce_scatter(mine, op, splits=[size] + [0] * (size - 1)), value[: 0 if rank else size])
            _same(F.reduce(mine, 1, op), value if rank == 1 else torch.zeros_like(value))
        _same(mine, before)
    assert F.all_reduce(torch.tensor(rank == 1), "max").item() is True
    assert F.all_reduce(torch.tensor(rank == 1), "min").item() is False
    assert F.all_reduce(torch.tensor([float(rank), float("nan")]), "max").isnan().tolist() == [False, True]


def _odd_shapes(rank, size):
    for shape in [(), (0,), (3, 0), (1, 1, 1)]:
        x = torch.ones(shape, requires_grad=True)
        for op in ("sum", "avg", "product", "min", "max"):
            y = F.all_reduce(x, op)
            assert (y.shape, y.requires_grad) == (x.shape, True)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert gradient.shape == x.shape
            assert F.reduce(x, 0, op).shape == x.shape
        assert F.broadcast(x, 0).shape == x.shape
    assert F.all_gather(torch.tensor(float(rank))).tolist() == list(range(size))
    scalars = F.all_gather(torch.tensor(float(rank)), concat=False)
    assert [s.shape for s in scalars] == [()] * size
    assert F.all_gather(torch.ones(0, 3)).shape == (0, 3)
    assert F.all_to_all(torch.ones(0, 3)).shape == (0, 3)
    assert F.reduce_scatter(torch.ones(0, 3), "max").shape == (0, 3)
    assert F.scatter(torch.ones(size, 0) if rank == 0 else None).shape == (1, 0)


def _torch_ops(rank, size):
    x = torch.tensor([rank + 1.0])
    assert F.all_reduce(x, dist.ReduceOp.MAX).item() == size
    assert F.all_reduce(x, dist.ReduceOp.AVG).item() == (size + 1) / 2
    conjugate = F.all_reduce(torch.tensor([1 + 2j]).conj())
    assert conjugate.item() == size * (1 - 2j)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [_moves, _reductions, _odd_shapes, _torch_ops])
def test_values(world_size, case):
    run_ranks(case, world_size)


def _joins_in(rank, size):
    """Only rank 0's input requires grad: the others' results do too, and their losses count."""
    x = torch.ones(2, requires_grad=rank == 0)
    for collective in (F.all_reduce, F.broadcast, F.all_gather, F.all_to_all if size == 2 else F.all_gather):
        y = collective(x)
        assert y.requires_grad
        ((rank + 1.0) * y.sum()).backward()
    assert (x.grad is None) == (rank != 0)
    if rank == 0:
        total = size * (size + 1) / 2
        last = torch.tensor([1.0, 2.0]) if size == 2 else torch.full((2,), total)
        assert torch.equal(x.grad, 3 * total + last)
    y = F.scatter(torch.ones(size, requires_grad=True) if rank == 0 else None)
    y.sum().backward()
    with torch.no_grad():
        assert not F.all_reduce(torch.ones(1, requires_grad=True)).requires_grad
    assert not F.all_reduce(torch.ones(1, dtype=torch.int32)).requires_grad


def _linear_on_one_rank(rank, size):
    """Rank 0's loss is linear in the result, so its incoming gradient is a constant."""
    x = torch.full((), 2.0, requires_grad=True)
    y = F.all_reduce(x)
    (first,) = torch.autograd.grad(y if rank == 0 else y**3, x, create_graph=True)
    assert first.requires_grad
    assert first.item() == 1 + (size - 1) * 3 * (2 * size) ** 2
    first.backward()
    # d/dx_s of sum over r of first_r: every rank's first holds the size - 1 cubes' 6 y.
    assert x.grad.item() == size * (size - 1) * 6 * 2 * size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [_joins_in, _linear_on_one_rank])
def test_every_rank_joins_in_backward(world_size, case):
    run_ranks(case, world_size)


@on_ranks(2, 3, env={"MINDDP_CHECK_COLLECTIVES": "0"})
def test_without_checks(rank, size):
    x = torch.arange(size, dtype=torch.float32).requires_grad_()
    F.all_reduce(x, "product").sum().backward()
    assert F.all_gather(torch.ones(rank + 1)).shape == (size * (size + 1) // 2,)
    assert F.all_gather(torch.ones(2), sizes=[2] * size).shape == (2 * size,)
    assert F.all_to_all(x).tolist() == [float(rank)] * size
    assert F.all_to_all(x, [1] * size, [1] * size).tolist() == [float(rank)] * size
    assert F.all_to_all(x, [size] + [0] * (size - 1)).shape == ((size * size,) if rank == 0 else (0,))
    assert F.broadcast(x, 1).tolist() == list(range(size))
    assert F.scatter(x if rank == 0 else None).tolist() == [float(rank)]
    with pytest.raises(F.CollectiveError, match="is not one of"):
        F.all_reduce(x, "median")
    with pytest.raises(F.CollectiveError, match="MINDDP_CHECK_COLLECTIVES=0 no rank may pass None"):
        F.broadcast(None, 1)


@on_ranks(2)
def test_torch_compile_breaks_the_graph_and_works(rank, size):
    def program(x):
        return (F.all_reduce((x * 2).sin(), "product") * 3).sum() + F.all_gather(x.cos()).sum()

    x = torch.full((2,), 0.3 + rank, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager")
    (expected,) = torch.autograd.grad(program(x), x)
    (actual,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()  # forget the broken graph
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"minddp\.functional"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)
