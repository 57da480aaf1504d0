"""Measuring a live group's allreduce: every rank must end with the same cost."""

from minddp.planner.collective_cost import LinearCost, TableCost, fit_cost, measure_allreduce
from minddp.testing import run_ranks


def measure(rank, world_size):
    sizes, seconds = measure_allreduce(max_nbytes=1 << 18)
    cost = fit_cost(max_nbytes=1 << 18, budget_seconds=1.0)
    return sizes, seconds, type(cost).__name__, [cost(m) for m in (0, 1000, 1 << 20)]


def test_every_rank_measures_the_same_cost():
    results = run_ranks(measure, 2)
    assert results[0] == results[1]
    sizes, seconds, name, times = results[0]
    assert sizes == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18]
    assert all(t > 0 for t in seconds)
    assert name in (LinearCost.__name__, TableCost.__name__)
    assert 0 < times[0] <= times[1] <= times[2]
