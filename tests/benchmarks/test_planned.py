"""The computed optimum, tried on simulated steps, and on real ranks."""

import random
import sys
from pathlib import Path

import pytest
import torch

import minddp
from minddp.planner import LinearCost, bucket_spans, optimal_plan, plan_finish
from tests.on_ranks import on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from optimum.backward_profile import BackwardProfile, Burst, bursts, simulate_step
from optimum.planned import Measured, find_plan, search

COST = LinearCost(5e-4, 4e-9)
ALONE = [Burst(1, nbytes, COST(nbytes)) for nbytes in (1 << 10, 1 << 16, 4 << 20)]


def backward(seed, n=40):
    rng = random.Random(seed)
    ready = sorted(rng.uniform(0.01, 0.2) for _ in range(n))
    return BackwardProfile(ready, [rng.choice([4 << 10, 1 << 20, 4 << 20]) for _ in ready], 0.2, 0.1, 0.002)


def measure_with(profile, calls):
    """Steps of ``profile`` at ``COST``; indices run backwards."""
    order = list(range(len(profile.nbytes)))[::-1]

    def measure(buckets):
        calls.append(buckets)
        positions = [[order.index(index) for index in bucket] for bucket in buckets or [order]]
        spans = bucket_spans(positions, profile.ready_seconds, profile.nbytes, COST)
        collectives = [
            (sum(profile.nbytes[p] for p in bucket), profile.ready_seconds[max(bucket)], end)
            for bucket, (_, end) in zip(positions, spans)
        ]
        seconds = simulate_step(profile, positions, COST).step_seconds
        return Measured(seconds, profile, order, bursts(collectives))

    return measure


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_the_optimum_and_its_step_is_predicted(seed):
    profile, calls = backward(seed), []
    found = search(measure_with(profile, calls), [0] * 40, ALONE)
    optimum = optimal_plan(profile.ready_seconds, profile.nbytes, COST)
    positions = [[39 - index for index in bucket] for bucket in found.buckets]
    finish = plan_finish(positions, profile.ready_seconds, profile.nbytes, COST)
    assert finish == pytest.approx(optimum.finish_seconds, rel=0.01)
    assert found.predicted_seconds == pytest.approx(simulate_step(profile, positions, COST).step_seconds, rel=0.01)
    assert len(calls) <= 4 and len({str(buckets) for buckets in calls}) == len(calls)  # no plan twice


def test_the_cost_is_learned_from_the_steps_collectives():
    cost = search(measure_with(backward(0), []), [0] * 40, ALONE[-1:]).cost
    assert cost.latency_seconds == pytest.approx(5e-4, rel=1e-3)
    assert cost.seconds_per_byte == pytest.approx(4e-9, rel=1e-3)


def test_no_plan_mixes_kinds():
    kinds = [k % 3 // 2 for k in range(40)]
    found = search(measure_with(backward(0), []), kinds, ALONE)
    assert all(len({kinds[index] for index in bucket}) == 1 for bucket in found.buckets)


@on_ranks(2)
def test_all_ranks_find_the_same_plan_and_it_can_be_pinned(rank, world_size):
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    ddp = minddp.DistributedDataParallel(net)
    plan = find_plan(ddp, lambda: ddp(torch.ones(2, 32)).sum().backward(), steps=2)
    assert plan.notes["predicted_step_seconds"] > 0
    pinned = minddp.DistributedDataParallel(net, bucket_plan=plan)  # raises where the ranks' plans differ
    in_force = minddp.bucket_plan(pinned)
    assert (in_force.parameters, in_force.buckets) == (plan.parameters, plan.buckets)
