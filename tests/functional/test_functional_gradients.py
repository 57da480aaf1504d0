"""Every differentiable collective against finite differences across ranks, first and second derivatives."""

import math

import pytest
import torch
import torch.distributed as dist

from minddp import functional as F
from tests.functional import gradcheck
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks

# Three ranks run without the headers, two with them: gradients may not depend on that.
CHECKS = {2: {}, 3: {"MINDDP_CHECK_COLLECTIVES": "0"}}
OPS = ("sum", "avg", "product", "min", "max")
ROWS = {2: (1, 3), 3: (2, 0, 3)}  # uneven shares per world size


def _x(rank, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, dtype=dtype, generator=generator)


def _loss(rank, result):
    """A loss that is different on each rank and not linear."""
    parts = result if isinstance(result, list) else [result]
    total = 0
    for i, part in enumerate(parts):
        values = torch.view_as_real(part) if part.is_complex() else part
        total = total + ((rank + 2 + i) * values + 0.3).sin().sum() + (values**3).sum() * (rank + 1)
    return total


def _check(rank, program, x, **options):
    gradcheck.check(lambda y: _loss(rank, program(y)), x, **options)


def _reductions(rank, size, op):
    _check(rank, lambda y: F.all_reduce(y, op), _x(rank, 1, 2))
    _check(rank, lambda y: F.all_reduce(y, op), _x(rank))
    _check(rank, lambda y: F.reduce_scatter(y, op, splits=ROWS[size]), _x(rank, sum(ROWS[size])))
    _check(rank, lambda y: F.reduce_scatter(list(y.split(2)), op), _x(rank, 2 * size), order=1)
    _check(rank, lambda y: F.reduce(y, 1, op), _x(rank, 2))


def _zeros_in_products(rank, size):
    one = torch.tensor([0.0, 2.0, 0.0]) if rank == 0 else torch.tensor([3.0, 0.0, 0.0])
    for x in (one.double(), torch.zeros(2, dtype=torch.float64)):
        _check(rank, lambda y: F.all_reduce(y, "product"), x)


def _movements(rank, size):
    rows = ROWS[size]
    _check(rank, lambda y: F.all_gather(y), _x(rank, rows[rank], 2))
    _check(rank, lambda y: F.all_gather(y, concat=False), _x(rank, rows[rank], 1), order=1)
    _check(rank, lambda y: F.all_gather(y, concat=False), _x(rank))
    _check(rank, lambda y: F.broadcast(y, 1), _x(rank, 2, 1))
    _check(rank, lambda y: F.gather(y, 1), _x(rank, rows[rank], 1))
    _check(rank, lambda y: F.gather(y, 0, concat=False), _x(rank, rows[rank], 1), order=1)
    _check(rank, lambda y: F.scatter(y, 1, splits=rows), _x(rank, sum(rows)))
    _check(rank, lambda y: F.scatter(list(y.split(1)), 0), _x(rank, size, 1), order=1)
    _check(rank, lambda y: F.all_to_all(y), _x(rank, size))
    splits = [(rank + 2 * other) % 3 for other in range(size)]
    _check(rank, lambda y: F.all_to_all(y, splits), _x(rank, sum(splits)))
    _check(rank, lambda y: F.all_to_all(list(y.split(splits))), _x(rank, sum(splits)), order=1)


def _complex(rank, size):
    def x(*shape):
        return _x(rank, *shape, dtype=torch.complex128)

    for op in ("sum", "avg", "product"):
        _check(rank, lambda y, op=op: F.all_reduce(y, op), x(2))
    _check(rank, lambda y: F.reduce_scatter(y, "product"), x(size))
    _check(rank, lambda y: F.all_gather(y.conj()), x(2))
    _check(rank, lambda y: F.reduce(y, 0), x(2))
    _check(rank, lambda y: F.all_to_all(y), x(size))


def _strides(rank, size):
    x = _x(rank, 3, 2)
    _check(rank, lambda y: F.all_reduce(y.t(), "product"), x)
    _check(rank, lambda y: F.all_gather(y[:, ::2]), x)
    _check(rank, lambda y: F.broadcast(y.t().expand(2, 2, 3), 1), x, order=1)
    expanded = F.all_reduce(torch.ones(1).expand(4))
    assert (expanded.tolist(), expanded.is_contiguous()) == ([float(size)] * 4, True)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_reductions(world_size, op):
    run_ranks(_reductions, world_size, op, env=CHECKS[world_size])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [_movements, _complex, _strides, _zeros_in_products])
def test_other_collectives(world_size, case):
    run_ranks(case, world_size, env=CHECKS[world_size])


@on_ranks(2, 3)
def test_ties_share(rank, size):
    """Rank 0 and the last rank tie in column 0, all ranks in column 1, nobody in column 2."""
    edge = rank in (0, size - 1)
    x = torch.tensor([5.0 if edge else 1.0, 7.0, float(rank)], requires_grad=True)
    (F.all_reduce(x, "max") * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    share = [size / 2 * edge, 2.0, 3.0 * size * (rank == size - 1)]
    torch.testing.assert_close(x.grad, torch.tensor(share))
    x.grad = None
    F.reduce_scatter(x.repeat(size), "max").sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([size / 2 * edge, 1.0, float(size) * (rank == size - 1)]))


@on_ranks(2, 3)
def test_a_replicated_loss_counts_once_at_every_order(rank, size):
    """Programs whose last part all ranks repeat, beside one process that does everything."""
    rows = ROWS[size]
    head = _x(17, 3, 2)

    def replicated_loss(y):
        return (y @ head).sin().sum() if y.shape[-1:] == (3,) else (y * 1.3).sin().sum()

    def compare(ours, one_process, shapes=((2, 3),) * size):
        """``shapes``: of the ranks' parts of the one process' input."""
        x = _x(rank, *shapes[rank]).requires_grad_()
        (first,) = torch.autograd.grad(ours(x), x, create_graph=True)
        second_loss = F.all_reduce((first**2).sum(), loss="replicated")
        second_loss.backward()
        everything = [_x(r, *shape).requires_grad_() for r, shape in enumerate(shapes)]
        firsts = torch.autograd.grad(one_process(everything), everything, create_graph=True)
        seconds = torch.autograd.grad(sum((g**2).sum() for g in firsts), everything, materialize_grads=True)
        torch.testing.assert_close(first, firsts[rank])
        torch.testing.assert_close(x.grad, seconds[rank])

    for op, combine in {
        "sum": lambda xs: sum(xs),
        "avg": lambda xs: sum(xs) / size,
        "product": lambda xs: math.prod(xs),
        "min": lambda xs: torch.stack(xs).amin(0),
        "max": lambda xs: torch.stack(xs).amax(0),
    }.items():
        compare(
            lambda y, op=op: replicated_loss(F.all_reduce(y**2, op, loss="replicated")),
            lambda xs, combine=combine: replicated_loss(combine([x**2 for x in xs])),
        )
    compare(
        lambda y: replicated_loss(F.broadcast(y**2, 1, loss="replicated")),
        lambda xs: replicated_loss(xs[1] ** 2) + sum(0 * x.sum() for x in xs),
    )
    compare(
        lambda y: replicated_loss(F.all_gather(y**2, loss="replicated")),
        lambda xs: replicated_loss(torch.cat([x**2 for x in xs])),
        [(count, 3) for count in rows],
    )


@on_ranks(3)
def test_subgroup(rank, size):
    """A group whose ranks are not those of the default group."""
    members = [1, 2]
    group = dist.new_group(members)
    if rank in members:
        assert dist.get_rank(group) == members.index(rank)
        for program in (
            lambda y: F.all_reduce(y, "product", group),
            lambda y: F.all_gather(y, group),
            lambda y: F.broadcast(y, 1, group),
            lambda y: F.broadcast(y, group=group, global_src=1),
            lambda y: F.reduce(y, group=group, global_dst=2),
            lambda y: F.gather(y, group=group, global_dst=1),
            lambda y: F.scatter(y, group=group, global_src=2),
            lambda y: F.reduce_scatter(y, "max", group),
            lambda y: F.all_to_all(y, group=group),
        ):
            gradcheck.check(lambda y, p=program: _loss(rank, p(y)), _x(rank, 2), group)
        received = F.broadcast(torch.full((2,), float(rank)), group=group, global_src=1)
        assert received.tolist() == [1.0, 1.0]
    dist.barrier()
