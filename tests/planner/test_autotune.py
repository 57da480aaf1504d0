"""The tuner's agreement over real ranks, on a reducer whose times are made up and differ by rank."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minddp.planner import BucketPlan, LinearCost, autotune, bucket_spans
from minddp.planner.autotune import AutoTuner, TunerSettings
from tests.faults.logged import logged
from tests.on_ranks import on_ranks
from tests.ranks.own_group import OwnGroup
from tests.ranks_pool import run_ranks

N = 12
NBYTES = [2 << 20] * N
SHAPES = [(1 << 19,)] * N
DTYPES = [torch.float32] * N
NAMES = [f"layer{i}.weight" for i in range(N)]
SETTINGS = TunerSettings(measured_iterations=2, laps=2)


class FakeReducer:
    """Reports the step that its buckets would take; rank 1 computes a tenth slower than rank 0."""

    def __init__(self, rank, group=None):
        self.cost = LinearCost(1e-3, 1e-8)
        self.group, self.nbytes, self.kinds = group, NBYTES, DTYPES
        self.parameters = SimpleNamespace(facts=lambda: (NAMES, SHAPES, DTYPES), device=torch.device("cpu"))
        self.ready = [0.02 * (N - index) * (1 + 0.1 * rank) for index in range(N)]
        self._buckets = [list(range(N))]
        self.iteration = 0
        self.reads = 0
        self.changes = []

    @property
    def reducer(self):
        return self

    def buckets(self):
        return self._buckets

    def set_buckets(self, buckets):
        assert sorted(index for bucket in buckets for index in bucket) == list(range(N))
        self._buckets = buckets
        self.changes.append((self.iteration, buckets))

    def last_step(self):
        self.reads += 1
        spans = bucket_spans(self._buckets, self.ready, NBYTES, self.cost)
        end = max(max(self.ready), spans[-1][1])
        return {
            "iteration": self.iteration,
            "forward_begin_ns": 0,
            "backward_begin_ns": 10**7,
            "ready_ns": [self.ns(seconds) for seconds in self.ready],
            "backward_end_ns": self.ns(max(self.ready)),
            "finalize_end_ns": self.ns(end + 0.001),
            "buckets": [
                {
                    "nbytes": sum(NBYTES[i] for i in bucket),
                    "launch_ns": self.ns(begin),
                    "done_ns": self.ns(end),
                }
                for bucket, (begin, end) in zip(self._buckets, spans)
            ],
        }

    def ns(self, seconds):
        return 10**7 + round(seconds * 1e9)


def make(rank, group=None):
    reducer = FakeReducer(rank, group or dist.group.WORLD)
    return reducer, AutoTuner(reducer, settings=SETTINGS)


def train(reducer, tuner, forwards=1, limit=400):
    """Steps until the tuner settles, with ``forwards`` forwards before each backward."""
    while not tuner.settled and reducer.iteration < limit:
        for _ in range(forwards):
            tuner.before_forward()
        reducer.iteration += 1


def tune_together(rank, world_size):
    reducer, tuner = make(rank)
    log = logging.getLogger("minddp")
    before = log.level
    log.setLevel(logging.INFO)
    with logged() as seen:
        train(reducer, tuner, forwards=1 + rank)  # a rank may run forward more often than backward
    log.setLevel(before)
    assert seen == ([f'bucket_cap_mb="auto": {tuner.plan.summary()}'] if rank == 0 else [])
    reads = reducer.reads
    for _ in range(10):
        tuner.before_forward()
        reducer.iteration += 1
    plan = tuner.plan
    return tuner.settled, reducer.changes, reducer.buckets(), plan.to_json(), reducer.reads - reads


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_change_buckets_together_and_keep_the_same_plan(world_size):
    results = run_ranks(tune_together, world_size)
    assert all(result == results[0] for result in results)
    settled, changes, buckets, text, reads_after = results[0]
    assert settled
    assert reads_after == 0
    assert len({iteration for iteration, _ in changes}) == len(changes) > 3
    plan = BucketPlan.from_json(text)
    assert plan.parameter_buckets(NAMES, SHAPES, DTYPES) == buckets
    notes = plan.notes
    assert notes["measured_step_seconds"] < notes["default_step_seconds"]
    assert notes["measured_step_seconds"] == min(trial["step_seconds"] for trial in notes["trials"])


def tune_alone_fails(rank, world_size):
    reducer, tuner = make(rank)
    if rank == 0:

        class Broken(autotune.PlanSearch):
            def _finalists(self, trials):
                raise ArithmeticError("no plan today")

        autotune.PlanSearch, original = Broken, autotune.PlanSearch
    try:
        with logged() as caught:
            train(reducer, tuner)
    finally:
        if rank == 0:
            autotune.PlanSearch = original
    assert reducer.buckets() == FakeReducer(rank).buckets()
    return tuner.settled, tuner.plan, reducer.iteration, caught


def test_a_failure_of_rank_0s_search_ends_the_tuning_on_every_rank():
    results = run_ranks(tune_alone_fails, 2)
    assert [settled for settled, *_ in results] == [True, True]
    assert results[0][1] is None
    assert results[0][2] == results[1][2]
    assert "gave up and keeps the default buckets: ArithmeticError: no plan today" in results[0][3][0]
    assert results[1][3] == []


def tune_on_its_own_group(rank, world_size):
    """On a class of its own in Python, which torch's tables do not hold. As on CUDA, nobody sees collectives end."""
    group = OwnGroup("auto")
    reducer, tuner = make(rank, group)
    shown = reducer.last_step

    def without_done():
        step = shown()
        for bucket in step["buckets"]:
            bucket["done_ns"] = -1
        return step

    reducer.last_step = without_done
    train(reducer, tuner)
    assert tuner.plan.notes["backend"] == group.name()
    return tuner.settled, reducer.buckets(), tuner.plan.notes["choice"]


def test_a_plan_is_made_on_a_group_that_torchs_tables_do_not_hold():
    results = run_ranks(tune_on_its_own_group, 2)
    assert results[0] == results[1]
    assert results[0][0]
    assert results[0][2].startswith("uniform")


@on_ranks(1)
def test_one_rank_has_nothing_to_tune(rank, world_size):
    reducer, tuner = make(rank)
    tuner.before_forward()
    assert (tuner.settled, reducer.reads) == (True, 0)
