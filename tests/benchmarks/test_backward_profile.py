"""Steps against arithmetic, what measured steps tell, and profiles that cannot be."""

import sys
from pathlib import Path

import pytest

from minddp.planner import LinearCost, optimal_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from optimum.backward_profile import BackwardProfile, Burst, StepTimes, bursts, fit_bursts, simulate_step

HOP = LinearCost(1e-5, 1e-9)
PROFILE = BackwardProfile([0.01, 0.02, 0.03], [4 << 20, 8 << 20, 1 << 20], 0.03, 0.02, 0.001)


def test_a_step_is_the_arithmetic_of_its_buckets():
    step = simulate_step(PROFILE, [[0], [1, 2]], LinearCost(0.001, 1e-9))
    second = 0.001 + (9 << 20) * 1e-9  # it begins when backward has ended, and the first bucket is done
    assert step.finish_seconds == pytest.approx(0.03 + second)
    assert step.step_seconds == pytest.approx(0.02 + 0.03 + second + 0.001)


def test_hidden_communication_leaves_backward_as_the_finish():
    assert simulate_step(BackwardProfile([0.01], [4], 0.5), [[0]], LinearCost(0.1, 0.0)) == (0.5, 0.11)


def last_step(shift=0):
    """What the reducer reports, in ns: three parameters, the second without a gradient, two buckets."""
    return {
        "iteration": 7,
        "forward_begin_ns": 1000 + shift,
        "forward_end_ns": 3000 + shift,
        "backward_begin_ns": 3000 + shift,
        "ready_ns": [5000 + shift, -1, 4000 + shift],
        "backward_end_ns": 6000 + shift,
        "finalize_end_ns": 9500 + shift,
        "buckets": [
            {"nbytes": 8, "launch_ns": 4100 + shift, "done_ns": 7100 + shift},
            {"nbytes": 4, "launch_ns": 6000 + shift, "done_ns": 9100 + shift},
        ],
    }


def test_a_last_step_is_read_into_seconds():
    times = StepTimes.from_last_step(last_step(shift=10**12))
    assert times.ready_seconds == pytest.approx([2e-6, 3e-6, 1e-6])
    assert (times.forward_seconds, times.backward_seconds) == pytest.approx((2e-6, 3e-6))
    assert (times.step_seconds, times.tail_seconds) == pytest.approx((8.5e-6, 0.4e-6))
    assert times.collectives == [pytest.approx((8, 1.1e-6, 4.1e-6)), pytest.approx((4, 3e-6, 6.1e-6))]
    assert bursts(times.collectives) == [Burst(2, 12, pytest.approx(5e-6))]


def test_times_of_several_steps_and_ranks_become_one():
    times = StepTimes.from_last_step(last_step())
    assert times.with_row(times.row()) == times
    late = times.with_row([value + 1 for value in times.row()])
    assert StepTimes.median([times, late, late]) == late
    both = StepTimes.slowest([times, late])
    assert both.ready_seconds == late.ready_seconds
    assert both.step_seconds == late.step_seconds
    # The late rank counts the collectives' ends from a later origin, so they come sooner in its time.
    assert [end for _, _, end in both.collectives] == pytest.approx([-1 + 4.1e-6, -1 + 6.1e-6])


def test_bursts_outweigh_a_lone_small_message_that_was_slow():
    seen = [Burst(1, 1024, 3e-3)] + [Burst(k, k << 20, k * (3e-4 + 9e-3)) for k in (1, 4, 19)]
    cost = fit_bursts([*seen, Burst(1, 4 << 20, 3e-4 + 4 * 9e-3)])
    assert cost.latency_seconds == pytest.approx(3e-4)
    assert cost(1 << 20) == pytest.approx(3e-4 + 9e-3)
    with pytest.raises(ValueError, match="no collective was timed"):
        fit_bursts([])


def test_bursts_are_what_ran_without_a_pause():
    assert bursts([(1, 0.0, 2.0), (2, 3.0, 4.0), (4, 3.5, 6.0), (8, 5.0, 5.5), (16, 6.0, 9.0)]) == [
        Burst(1, 1, 2.0),
        Burst(3, 14, 3.0),
        Burst(1, 16, 3.0),
    ]
    assert bursts([(1, 0.0, -1.0), (2, 1.0, 2.0), (4, 1.5, -1.0)]) == [Burst(1, 2, 1.0)]
    assert bursts([]) == []


def test_a_profile_has_the_gradients_in_ready_order():
    profile, order = BackwardProfile.from_times(StepTimes.from_last_step(last_step()), [10, 20, 30])
    assert order == [2, 0, 1]
    assert profile.nbytes == [30, 10, 20]
    assert profile.ready_seconds == pytest.approx([1e-6, 2e-6, 3e-6])
    assert optimal_plan(profile.ready_seconds, profile.nbytes, HOP).buckets == [[0, 1, 2]]


@pytest.mark.parametrize(
    "arguments", [([], [], 0.0), ([1.0, 0.5], [1, 1], 2.0), ([1.0], [1], 0.5), ([1.0], [1], 1.0, -1.0)]
)
def test_a_profile_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match="BackwardProfile"):
        BackwardProfile(*arguments)
