"""Topologies against message-by-message replays; planned buckets against capped ones at every size of a group."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from optimum.backward_profile import BackwardProfile
from topologies import Hierarchy, Ring, Tree, scaling

from minddp.planner import LinearCost

HOP = LinearCost(1e-5, 1e-9)


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


@pytest.mark.parametrize("nbytes", [0, 4, 10_000, 1 << 24])
def test_tree_uses_the_best_number_of_pieces(nbytes):
    ranks, fill = 16, 7
    wire = 2 * 15 / 16 * HOP.seconds_per_byte * nbytes
    times = [(fill + k) * (HOP.latency_seconds + wire / k) for k in range(1, 5000)]
    assert Tree(HOP).cost(ranks)(nbytes) == pytest.approx(min(times))


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
