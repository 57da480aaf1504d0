"""Cost functions and their fits, without a process group and of a live one's all-reduce."""

import random
import sys
from pathlib import Path

import numpy
import pytest

from minddp.planner import LinearCost, optimal_plan
from tests.ranks_pool import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from optimum.collective_cost import TableCost, fit_cost, fit_linear, fit_samples, measure_allreduce


def test_table_cost_interpolates_extrapolates_and_never_falls():
    cost = TableCost([1000, 100, 3000], [2.0, 1.0, 1.5])
    assert [cost(m) for m in (0, 100, 550, 1000, 2000)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert TableCost([0, 10], [1.0, 2.0])(20) == 3.0


def test_a_table_plan_uses_the_cheap_size():
    cost = TableCost([1, 2, 3, 4], [1.0, 1.0, 9.0, 9.0])
    assert optimal_plan([0.0] * 4, [1] * 4, cost).buckets == [[0, 1], [2, 3]]


def test_numpys_numbers_are_numbers():
    table = TableCost(numpy.array([1, 2]), numpy.array([1.0, 2.0]))
    assert repr(table) == "TableCost([1, 2], [1.0, 2.0])"
    line = fit_linear(numpy.array([1, 2]), numpy.array([2.0, 3.0]), numpy.array([1, 1]))
    assert line == LinearCost(1.0, 1.0)


@pytest.mark.parametrize("arguments", [([1], [1.0]), ([1, 2], [1.0]), ([1, 1], [1.0, 2.0]), ([1, 2], [1.0, -1.0])])
def test_table_cost_refuses(arguments):
    with pytest.raises(ValueError, match="TableCost"):
        TableCost(*arguments)


def test_fit_is_exact_on_a_line_and_unmoved_by_a_wild_minority():
    rng = random.Random(0)
    sizes = [1 << k for k in range(10, 26)]
    truth = LinearCost(2e-4, 1e-9)
    fit = fit_linear(sizes, [truth(m) for m in sizes])
    assert fit.latency_seconds == pytest.approx(2e-4)
    assert fit.seconds_per_byte == pytest.approx(1e-9)

    noisy = [truth(m) * rng.uniform(0.99, 1.01) * (20 if k % 4 == 3 else 1) for k, m in enumerate(sizes)]
    fit = fit_linear(sizes, noisy)
    assert fit.latency_seconds == pytest.approx(2e-4, rel=0.03)
    assert fit.seconds_per_byte == pytest.approx(1e-9, rel=0.03)


def test_fit_of_one_size_and_of_falling_times_stays_a_cost():
    assert fit_linear([100], [1.0])(100) == pytest.approx(1.0)
    falling = fit_linear([1, 10, 100], [3.0, 2.0, 1.0])
    assert falling.latency_seconds >= 0
    assert falling.seconds_per_byte >= 0


@pytest.mark.parametrize("times", [[], [0.0], [float("nan")]])
def test_fit_refuses_times_that_are_none(times):
    with pytest.raises(ValueError, match="above 0"):
        fit_linear([1] * len(times), times)


def test_fit_samples_picks_a_table_when_no_line_fits():
    sizes = [1 << k for k in range(10, 20)]
    line = fit_samples(sizes * 3, [1e-3 + m * 1e-8 for m in sizes] * 3)
    assert isinstance(line, LinearCost)

    def step(m):
        return 1e-3 if m < 1 << 15 else 2e-2 + 1e-8 * m

    table = fit_samples(sizes, [step(m) for m in sizes])
    assert isinstance(table, TableCost)
    assert table(1 << 12) == pytest.approx(1e-3)
    assert table(1 << 18) == pytest.approx(step(1 << 18))


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
    assert 0 <= times[0] <= times[1] <= times[2] != 0
