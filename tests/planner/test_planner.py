"""The planner against brute force, its two programs against each other, and plans as files."""

import itertools
import json
import math
import os

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minddp
from minddp.planner import BucketPlan, LinearCost, optimal, optimal_plan, plan_finish
from tests.on_ranks import on_ranks

NAMES = ["a.weight", "a.bias", "b.weight"]
SHAPES = [(4, 3), (4,), (2, 4)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16]


def partitions(positions):
    """Every way to cut a list into contiguous buckets."""
    for cuts in itertools.product([False, True], repeat=max(0, len(positions) - 1)):
        buckets = [[positions[0]]] if positions else []
        for position, cut in zip(positions[1:], cuts):
            if cut:
                buckets.append([])
            buckets[-1].append(position)
        yield buckets


def brute_force(ready, nbytes, cost, slack=None):
    """The least (finish, number of buckets) over all plans of one kind; the least number with a slack."""
    plans = partitions(list(range(len(ready))))
    found = [(plan_finish(plan, ready, nbytes, cost), len(plan)) for plan in plans]
    if slack is None:
        return min(found)
    return min(count for finish, count in found if finish <= min(found)[0] + slack + 1e-9)


SECONDS = st.integers(0, 40).map(lambda x: x / 8)
LINEAR = st.builds(LinearCost, SECONDS, SECONDS)


@st.composite
def gradients(draw, max_size):
    n = draw(st.integers(1, max_size))
    ready = sorted(draw(st.lists(SECONDS, min_size=n, max_size=n)))
    return ready, draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))


@settings(max_examples=150, deadline=None)
@given(gradients(8), LINEAR)
def test_linear_plan_is_the_brute_force_optimum_with_the_fewest_buckets(instance, cost):
    ready, nbytes = instance
    plan = optimal_plan(ready, nbytes, cost)
    finish, count = brute_force(ready, nbytes, cost)
    assert plan.finish_seconds == pytest.approx(finish, abs=1e-9)
    assert len(plan.buckets) == count


@settings(max_examples=100, deadline=None)
@given(gradients(7), st.lists(SECONDS, min_size=64, max_size=64))
def test_any_cost_is_solved_exactly_even_one_that_falls(instance, seconds):
    ready, nbytes = instance
    plan = optimal_plan(ready, nbytes, lambda m: seconds[m])
    assert plan.finish_seconds == pytest.approx(brute_force(ready, nbytes, lambda m: seconds[m])[0], abs=1e-9)
    assert plan_finish(plan.buckets, ready, nbytes, seconds.__getitem__) == pytest.approx(
        plan.finish_seconds, abs=1e-9
    )


@settings(max_examples=200, deadline=None)
@given(gradients(120), LINEAR)
def test_the_linear_program_equals_the_quadratic_one(instance, cost):
    ready, nbytes = instance
    prefix = [0, *itertools.accumulate(nbytes)]
    fast = optimal._finish_times_linear(ready, prefix, cost)
    assert fast == pytest.approx(optimal._finish_times(ready, prefix, cost), abs=1e-9)
    assert optimal_plan(ready, nbytes, cost).finish_seconds == pytest.approx(fast[-1], abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(gradients(7), LINEAR, st.lists(st.sampled_from("xyz"), min_size=7, max_size=7))
def test_kinds_never_share_a_bucket_and_none_has_more_than_alone(instance, cost, letters):
    ready, nbytes = instance
    kinds = letters[: len(ready)]
    plan = optimal_plan(ready, nbytes, cost, kinds=kinds)
    assert all(len({kinds[p] for p in bucket}) == 1 for bucket in plan.buckets)
    latest = 0.0
    for kind in set(kinds):
        lane = [position for position, other in enumerate(kinds) if other == kind]
        alone = optimal_plan([ready[p] for p in lane], [nbytes[p] for p in lane], cost)
        latest = max(latest, alone.finish_seconds)
        mine = [bucket for bucket in plan.buckets if kinds[bucket[0]] == kind]
        assert list(itertools.chain(*mine)) == lane
        assert len(mine) <= len(alone.buckets)
    assert plan.finish_seconds >= latest - 1e-9
    for kind in set(kinds):  # each is done, alone, when the last of them can be
        mine = [bucket for bucket in plan.buckets if kinds[bucket[0]] == kind]
        assert plan_finish(mine, ready, nbytes, cost) <= latest + 1e-9


def test_slack_is_kept_with_several_kinds():
    for slack in (0.0, 0.003, 0.05, 1.0, 10.0):
        arguments = [0.1 * k for k in range(40)], [1] * 40, LinearCost(0.01, 1e-3)
        tight = optimal_plan(*arguments, kinds=[k % 8 for k in range(40)])
        loose = optimal_plan(*arguments, kinds=[k % 8 for k in range(40)], slack_seconds=slack)
        assert loose.finish_seconds <= tight.finish_seconds + slack + 1e-9
        assert len(loose.buckets) <= len(tight.buckets)
    assert len(loose.buckets) == 8 < len(tight.buckets), "those of each kind are joined"
    # Each kind alone would keep it in fewer buckets, all together would not.
    ready, nbytes = [0.375, 3.25, 3.375, 4.125, 4.125, 4.875], [3, 6, 3, 1, 2, 1]
    for slack, finish in ((0.0, 16.0), (0.5, 16.0), (0.75, 16.75)):
        plan = optimal_plan(ready, nbytes, LinearCost(2.875, 0.25), kinds="zxzyxz", slack_seconds=slack)
        assert plan.finish_seconds == finish


def test_numpys_numbers_are_numbers(tmp_path):
    ready, nbytes = [0.0, 0.5, 0.5], [1 << 30, 2 << 29, 3 << 29]
    cost = LinearCost(0.1, 1e-9)
    plan = optimal_plan(ready, nbytes, cost, kinds="xxy", slack_seconds=0.1)
    same = optimal_plan(
        numpy.array(ready, dtype=numpy.float32), numpy.array(nbytes, dtype=numpy.int64),
        LinearCost(numpy.float64(0.1), numpy.float64(1e-9)), kinds=numpy.array(list("xxy")),
        slack_seconds=numpy.float64(0.1),
    )  # fmt: skip
    assert same == plan
    assert optimal_plan(ready, numpy.array(nbytes, dtype=numpy.int32), cost) == optimal_plan(ready, nbytes, cost)
    path = tmp_path / "plan.json"
    mine = BucketPlan(numpy.array([[0, 1], [2, 3]]), numpy.float32(0.5))
    mine.save(path)
    assert BucketPlan.load(path) == mine == BucketPlan([[0, 1], [2, 3]], 0.5)
    assert repr(LinearCost(numpy.float64(1), numpy.int64(2))) == repr(LinearCost(1.0, 2.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: optimal_plan([0.0], [None], LinearCost(1, 1)),
        lambda: LinearCost("1", 1),
    ],
)
def test_what_is_no_number_is_named(call):
    with pytest.raises(TypeError, match=r"(nbytes|latency_seconds) must be numbers, got"):
        call()


@settings(max_examples=100, deadline=None)
@given(gradients(8), LINEAR, SECONDS)
def test_slack_leaves_the_fewest_buckets_that_keep_it(instance, cost, slack):
    ready, nbytes = instance
    plan = optimal_plan(ready, nbytes, cost, slack_seconds=slack)
    assert len(plan.buckets) == brute_force(ready, nbytes, cost, slack)


def test_no_gradients_make_an_empty_plan_and_one_makes_one_bucket():
    assert optimal_plan([], [], LinearCost(1, 1)) == BucketPlan([], 0.0)
    assert optimal_plan([2.0], [3], LinearCost(1.0, 1.0)) == BucketPlan([[0]], 6.0)


def test_ready_times_out_of_order_count_as_the_latest_before_them():
    cost = LinearCost(0.1, 0.0)
    assert optimal_plan([1.0, 0.0, 2.0], [1, 1, 1], cost) == optimal_plan([1.0, 1.0, 2.0], [1, 1, 1], cost)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (([0.0], [1, 2]), "one entry a gradient"),
        (([0.0, math.nan], [1, 2]), "ready_seconds must be finite .* position 1"),
        (([0.0, 1.0], [1, -2]), "nbytes must be finite and at least 0, got -2 at position 1"),
    ],
)
def test_bad_gradients_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        optimal_plan(*arguments, LinearCost(1, 1))


def test_a_plan_uses_the_cheap_size():
    assert optimal_plan([0.0] * 4, [1] * 4, lambda nbytes: 1.0 if nbytes <= 2 else 9.0).buckets == [[0, 1], [2, 3]]


def test_linear_cost_is_a_line_and_refuses_nonsense():
    assert LinearCost(0.5, 2.0)(3) == 6.5
    for bad in [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 1.0)]:
        with pytest.raises(ValueError, match=r"LinearCost: .* must be finite and at least 0"):
            LinearCost(*bad)


def model_plan():
    return BucketPlan([[0], [1, 2]], 0.5, notes={"found": "by hand"}).for_parameters(
        NAMES, SHAPES, DTYPES, order=[2, 1, 0]
    )


def test_a_plan_gives_its_models_indices_in_whatever_order_the_model_lists_them():
    plan = model_plan()
    assert plan.parameter_buckets(NAMES, SHAPES, DTYPES) == [[2], [1, 0]]
    assert plan.parameter_buckets(NAMES[::-1], SHAPES[::-1], DTYPES[::-1]) == [[0], [1, 2]]


def test_another_models_plan_is_refused_by_name():
    shapes = [(4, 3), (5,)]
    with pytest.raises(ValueError) as refusal:
        model_plan().parameter_buckets(["a.weight", "a.bias"], shapes, DTYPES[:2])
    text = str(refusal.value)
    assert "made for another model" in text
    assert "missing here: b.weight" in text
    assert "a.bias (float32[4] in the plan, float32[5] here)" in text
    with pytest.raises(ValueError, match="not in the plan: c, d, e, f, g and 1 more"):
        model_plan().parameter_buckets(NAMES + list("cdefgh"), SHAPES + [(1,)] * 6, DTYPES + [torch.float32] * 6)


def test_a_plan_of_bare_numbers_fits_no_model():
    with pytest.raises(ValueError, match="names no parameters"):
        BucketPlan([[0]], 0.0).parameter_buckets(["a"], [(1,)], [torch.float32])


@pytest.mark.parametrize("buckets", [[[0], [0]], [[1]], [[0], []]])
def test_buckets_that_are_no_partition_are_refused(buckets):
    with pytest.raises(ValueError, match="exactly once"):
        BucketPlan(buckets, 0.0)


def test_orders_and_names_that_do_not_fit_are_refused():
    plan = BucketPlan([[0, 1]], 0.0)
    with pytest.raises(ValueError, match=r"order must hold each parameter index 0\.\.1 once"):
        plan.for_parameters(["a", "b"], [(1,)] * 2, DTYPES[:2], order=[0, 0])
    with pytest.raises(ValueError, match="names holds a parameter twice: a"):
        plan.for_parameters(["a", "a"], [(1,)] * 2, DTYPES[:2])
    with pytest.raises(ValueError, match="3 parameters for 2 positions"):
        plan.for_parameters(NAMES, SHAPES, DTYPES)


def test_every_plan_prints_its_buckets_with_their_sizes_and_members():
    assert str(model_plan()).splitlines() == [
        "2 buckets, 3 gradients, 0.0 MiB",
        "bucket      MiB  gradients  which, in launch order",
        "     1     0.00          1  b.weight",
        "     2     0.00          2  a.bias, a.weight",
    ]
    assert repr(model_plan()) == "BucketPlan(2 buckets, 3 gradients, 0.0 MiB)"
    assert str(BucketPlan([[0], [1, 2]])).splitlines()[-1] == "     2                   2  1, 2"


@on_ranks(1)
def test_the_defaults_plan_prints_its_buckets(rank, world_size):
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(5)))
    first, second, *_ = str(minddp.bucket_plan(minddp.DistributedDataParallel(net))).splitlines()
    assert first.endswith("5 gradients, 5.0 MiB") and second.startswith("bucket      MiB")


def altered(**changes):
    return json.dumps({**json.loads(model_plan().to_json()), **changes})


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("{", "no JSON"),
        ("[]", "not written by BucketPlan.save"),
        (altered(version=99), "version 99; this minddp reads version 1"),
        ("[" * 100_000, "no JSON"),
        (altered(buckets=None), "incomplete or misshapen: it.'buckets'. is None"),
        (altered(finish_seconds=7).replace("7", "1e400"), "it.'finish_seconds'. is inf"),
        (altered(parameters=[{"name": 3, "shape": [], "dtype": ""}]), "it.'parameters'..0..'name'. is 3"),
        (altered(buckets=[[0]]), "3 parameters for 1 positions"),
        (altered(signature="0"), "was altered"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_path(tmp_path, text, complaint):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as refusal:
        BucketPlan.load(path)
    assert str(path) in str(refusal.value)


def test_what_is_no_path_and_no_list_of_buckets_is_named(tmp_path):
    for path in (None, 3, b"plan.json"):
        for act, name in ((BucketPlan.load, "load"), (model_plan().save, "save")):
            with pytest.raises(TypeError, match=f"BucketPlan.{name}: path must be a path"):
                act(path)
    (tmp_path / "plan.json").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="not a bucket plan"):
        BucketPlan.load(tmp_path / "plan.json")
    for buckets in (None, 3, "x", [3], [[0.5]]):
        with pytest.raises(TypeError, match="BucketPlan: buckets must be a list of lists of positions"):
            BucketPlan(buckets)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    model_plan().save(path)
    with pytest.raises(TypeError):
        BucketPlan([[0]], 0.0, notes={"model": object()}).save(path)
    assert BucketPlan.load(path) == model_plan()
    assert os.listdir(tmp_path) == ["plan.json"]
