"""Topologies against message-by-message replays, stragglers against draws, and efficiency against one step."""

import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulate import on_wire
from topologies import Hierarchy, Ring, Stragglers, Tree, mean_step_seconds, scaling

from minddp.planner import LinearCost, capped_buckets
from minddp.planner.backward_profile import BackwardProfile, simulate_step

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


def test_slow_ranks_delay_compute_and_not_the_network():
    cost = LinearCost(0.0, 1e-9)
    usual, slow = (mean_step_seconds(PROFILE, [[0, 1, 2]], cost, [factor]) for factor in (1.0, 2.0))
    assert slow - usual == pytest.approx(0.05)


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


def test_gradients_of_fewer_bytes():
    """Int8 has a scale for 256 numbers; the transfer is what grows shorter."""
    assert on_wire(PROFILE, "int8").nbytes == [round(nbytes * 260 / 1024) for nbytes in PROFILE.nbytes]
    assert on_wire(PROFILE, "bf16").nbytes == [nbytes // 2 for nbytes in PROFILE.nbytes]
    at_once = replace(PROFILE, forward_seconds=0.0, tail_seconds=0.0, ready_seconds=[0.0] * 3, backward_seconds=0.0)
    steps = [simulate_step(on_wire(at_once, wire), [[0, 1, 2]], HOP).step_seconds for wire in (None, "bf16", "int8")]
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.01) and steps[2] < 0.26 * steps[0]
