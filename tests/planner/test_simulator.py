"""Topologies against message-by-message replays, steps against arithmetic, and profiles as files."""

import math
import random
import statistics

import pytest

from minddp.planner import LinearCost, capped_buckets, optimal_plan
from minddp.planner.backward_profile import BackwardProfile, Burst, StepTimes, bursts, fit_bursts
from minddp.planner.simulator import (
    Hierarchy,
    Ring,
    Stragglers,
    Tree,
    mean_step_seconds,
    scaling,
    simulate_step,
)

HOP = LinearCost(1e-5, 1e-9)
PROFILE = BackwardProfile([0.01, 0.02, 0.03], [4 << 20, 8 << 20, 1 << 20], 0.03, 0.02, 0.001)


def replayed_ring(ranks, nbytes, hop):
    """Runs a ring allreduce chunk by chunk; its time, once every rank is seen to hold every sum."""
    chunk = nbytes / ranks
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    clock = [0.0] * ranks
    for step in range(2 * (ranks - 1)):
        sent = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        arrived = [(clock[rank] + hop(chunk), set(held[rank][piece])) for rank, piece in sent]
        for (rank, piece), (time, value) in zip(sent, arrived):
            right = (rank + 1) % ranks
            held[right][piece] |= value
            clock[right] = max(clock[right], time)
    assert all(piece == set(range(ranks)) for rank in held for piece in rank)
    return max(clock)


@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_ring_is_the_time_of_its_messages(ranks):
    cost = Ring(HOP).cost(ranks)
    for nbytes in (ranks, 1 << 20):
        assert cost(nbytes) == pytest.approx(replayed_ring(ranks, nbytes, HOP))


def test_a_ring_is_recovered_from_what_it_measures():
    for ranks in (2, 5):
        hop = Ring.from_measured(Ring(HOP).cost(ranks), ranks).hop
        assert hop.latency_seconds == pytest.approx(HOP.latency_seconds)
        assert hop.seconds_per_byte == pytest.approx(HOP.seconds_per_byte)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        Ring.from_measured(HOP, 1)


@pytest.mark.parametrize("nbytes", [0, 4, 10_000, 1 << 24])
def test_tree_uses_the_best_number_of_pieces(nbytes):
    ranks, fill = 16, 7
    wire = 2 * 15 / 16 * HOP.seconds_per_byte * nbytes
    times = [(fill + k) * (HOP.latency_seconds + wire / k) for k in range(1, 5000)]
    assert Tree(HOP).cost(ranks)(nbytes) == pytest.approx(min(times))


def test_trees_win_small_messages_on_many_ranks_and_rings_large_ones():
    ring, tree = Ring(HOP).cost(1024), Tree(HOP).cost(1024)
    assert tree(1000) < ring(1000) / 10
    assert ring(10 << 30) < tree(10 << 30)


def test_hierarchy_is_its_inner_ring_in_one_node_and_its_outer_ring_between_single_ranks():
    inner, outer = LinearCost(1e-6, 1e-11), HOP
    assert Hierarchy(inner, outer, 8).cost(4) == Ring(inner).cost(4)
    assert Hierarchy(inner, outer, 1).cost(6) == Ring(outer).cost(6)
    sixteen = Hierarchy(inner, outer, 8).cost(16)
    assert sixteen.seconds_per_byte == pytest.approx(2 * 7 / 8 * 1e-11 + 2 * 1 / 2 * 1e-9)


@pytest.mark.parametrize("topology", [Ring(HOP), Tree(HOP), Hierarchy(HOP, HOP)])
def test_one_rank_communicates_for_free(topology):
    assert topology.cost(1)(1 << 20) == 0.0


def test_a_step_is_the_arithmetic_of_its_buckets():
    step = simulate_step(PROFILE, [[0], [1, 2]], LinearCost(0.001, 1e-9))
    first, second = 0.001 + (4 << 20) * 1e-9, 0.001 + (9 << 20) * 1e-9
    assert step.spans == [pytest.approx((0.01, 0.01 + first)), pytest.approx((0.03, 0.03 + second))]
    assert step.exposed_seconds == pytest.approx(second)
    assert step.step_seconds == pytest.approx(0.02 + 0.03 + second + 0.001)


def test_slow_ranks_delay_compute_and_not_the_network():
    cost = LinearCost(0.0, 1e-9)
    usual, slow = (simulate_step(PROFILE, [[0, 1, 2]], cost, f) for f in (1.0, 2.0))
    assert slow.step_seconds - usual.step_seconds == pytest.approx(0.05)


def test_hidden_communication_leaves_backward_as_the_finish():
    profile = BackwardProfile([0.01], [4], 0.5)
    step = simulate_step(profile, [[0]], LinearCost(0.1, 0.0))
    assert (step.step_seconds, step.exposed_seconds) == (0.5, 0.0)


def test_stragglers_follow_the_largest_of_p_draws():
    sampled = Stragglers(sigma=0.1, steps=4000, seed=3).slowdowns(16)
    rng = random.Random(1)
    drawn = [max(math.exp(0.1 * abs(rng.gauss(0, 1))) for _ in range(16)) for _ in range(4000)]
    assert statistics.fmean(sampled) == pytest.approx(statistics.fmean(drawn), rel=0.01)
    assert statistics.pstdev(sampled) == pytest.approx(statistics.pstdev(drawn), rel=0.1)


def test_stragglers_are_seeded_and_grow_with_the_ranks():
    assert Stragglers(0.1, seed=1).slowdowns(8) == Stragglers(0.1, seed=1).slowdowns(8)
    assert Stragglers(0.1, seed=1).slowdowns(8) != Stragglers(0.1, seed=2).slowdowns(8)
    means = [statistics.fmean(Stragglers(0.1).slowdowns(p)) for p in (2, 64, 4096)]
    assert 1 < means[0] < means[1] < means[2]
    assert Stragglers(0.0).slowdowns(4096) == [1.0]
    with pytest.raises(ValueError, match="sigma must be at least 0"):
        Stragglers(-1.0)


def test_planned_buckets_are_never_behind_without_stragglers():
    rng = random.Random(0)
    ready = sorted(rng.uniform(0, 0.1) for _ in range(60))
    profile = BackwardProfile(ready, [rng.randrange(1 << 10, 1 << 21) for _ in ready], 0.1)
    caps = [1 << 20, 5 << 20, 25 << 20]
    for topology in (Ring(HOP), Tree(HOP), Hierarchy(HOP, HOP)):
        points = scaling(profile, topology, [1, 2, 64, 4096], caps)
        assert [point.ranks for point in points] == [1, 2, 64, 4096]
        assert points[0].efficiency(points[0].planned_seconds) == pytest.approx(1.0)
        for point in points:
            assert point.planned_seconds <= min(point.default_seconds, *point.uniform_seconds.values()) + 1e-9
            assert point.uniform_seconds[point.best_cap] == min(point.uniform_seconds.values())


def test_scaling_agrees_with_one_step():
    cost = Tree(HOP).cost(128)
    slow = Stragglers(0.05, steps=8, seed=1)
    (point,) = scaling(PROFILE, Tree(HOP), [128], [1 << 20], slow)
    buckets = capped_buckets(PROFILE.nbytes, 1 << 20)
    assert point.uniform_seconds[1 << 20] == mean_step_seconds(PROFILE, buckets, cost, slow.slowdowns(128))
    with pytest.raises(ValueError, match="at least one cap"):
        scaling(PROFILE, Tree(HOP), [2], [])


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


def test_stretching_keeps_the_shares_of_a_step():
    times = StepTimes.from_last_step(last_step())
    twice = times.stretched_to(2 * times.step_seconds)
    assert twice.step_seconds == pytest.approx(17e-6)
    assert twice.ready_seconds == pytest.approx([4e-6, 6e-6, 2e-6])
    assert twice.collectives == times.collectives


def test_bursts_are_what_ran_without_a_pause():
    assert bursts([(1, 0.0, 2.0), (2, 3.0, 4.0), (4, 3.5, 6.0), (8, 5.0, 5.5), (16, 6.0, 9.0)]) == [
        Burst(1, 1, 2.0),
        Burst(3, 14, 3.0),
        Burst(1, 16, 3.0),
    ]
    assert bursts([(1, 0.0, -1.0), (2, 1.0, 2.0), (4, 1.5, -1.0)]) == [Burst(1, 2, 1.0)]
    assert bursts([]) == []


def test_a_profile_has_the_gradients_in_ready_order(tmp_path):
    profile, order = BackwardProfile.from_times(StepTimes.from_last_step(last_step()), [10, 20, 30])
    assert order == [2, 0, 1]
    assert profile.nbytes == [30, 10, 20]
    assert profile.ready_seconds == pytest.approx([1e-6, 2e-6, 3e-6])
    profile.save(tmp_path / "p.json")
    assert BackwardProfile.load(tmp_path / "p.json") == profile
    assert optimal_plan(profile.ready_seconds, profile.nbytes, HOP).buckets == [[0, 1, 2]]


@pytest.mark.parametrize("text", ["{", "[]", '{"ready_seconds": [1.0], "nbytes": [1, 2], "backward_seconds": 1}'])
def test_a_file_without_a_profile_is_refused_by_path(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json holds no backward profile"):
        BackwardProfile.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "arguments", [([], [], 0.0), ([1.0, 0.5], [1, 1], 2.0), ([1.0], [1], 0.5), ([1.0], [1], 1.0, -1.0)]
)
def test_a_profile_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match="BackwardProfile"):
        BackwardProfile(*arguments)


def test_gradients_of_fewer_bytes():
    """Int8 has a scale for 256 numbers; the transfer is what grows shorter."""
    assert PROFILE.on_wire("int8").nbytes == [round(nbytes * 260 / 1024) for nbytes in PROFILE.nbytes]
    assert PROFILE.on_wire("bf16").nbytes == [nbytes // 2 for nbytes in PROFILE.nbytes]
    profiles = [PROFILE.on_wire(wire) for wire in (None, "bf16", "int8")]
    steps = [simulate_step(profile, [[0, 1, 2]], HOP).exposed_seconds for profile in profiles]
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.01) and steps[2] < 0.26 * steps[0]
    with pytest.raises(ValueError, match="one of bf16, fp16, int8, got 'int4'"):
        PROFILE.on_wire("int4")
