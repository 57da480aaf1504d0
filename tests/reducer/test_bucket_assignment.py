"""Bucket assignment: every parameter once, caps kept, small bucket last, kinds apart, order of completion."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp import messages
from minddp.buckets import (
    Agreed,
    agree_on_order,
    assign_buckets,
    check_buckets,
    ready_order,
    torchs_buckets,
    unordered_buckets,
)
from minddp.config import make_config

KB = 1024


BIAS, WEIGHT = KB // 64, 10 * KB
ASSIGNED = {
    "the rest is in the first bucket": (([KB] * 5, [0] * 5, [4, 3, 2, 1, 0], [2 * KB]), [[4], [3, 2], [1, 0]]),
    "the last bucket is the small one": (([KB] * 6, [0] * 6, range(6), [4 * KB], KB), [[0], [1, 2, 3, 4], [5]]),
    "in launch order, the last cap again": (([KB] * 6, [0] * 6, range(6), [KB, 2 * KB]), [[0], [1, 2], [3, 4], [5]]),
    "and by kind": (([KB] * 6, [0, 1] * 3, range(6), [KB, 2 * KB]), [[0], [1], [2, 4], [3, 5]]),
    "a cap is exceeded by less than a parameter": (([WEIGHT, 1], [0, 0], [0, 1], [KB]), [[0, 1]]),
    "nor by a large one that follows": (([KB, WEIGHT], [0, 0], [0, 1], [KB]), [[0], [1]]),
    "a bias goes with the weight after it": (([BIAS, WEIGHT] * 3, [0] * 6, range(6), [KB]), [[0, 1], [2, 3], [4, 5]]),
    "what is large beside the cap does not": (([KB, WEIGHT] * 2, [0] * 4, range(4), [KB]), [[0], [1], [2], [3]]),
    "small ones up to a sixteenth": (
        ([BIAS] * 6 + [WEIGHT], [0] * 7, range(7), [KB]),
        [[0, 1], [2, 3, 4, 5, 6]],
    ),
    "nor does another kind's": (([BIAS, WEIGHT], [0, 1], range(2), [KB]), [[0], [1]]),
    "in a list each cap closes": (([WEIGHT, BIAS, WEIGHT], [0] * 3, range(3), [KB, KB]), [[0], [1, 2]]),
    "kinds come as they complete": (([KB] * 4, ["a", "b"] * 2, range(4), [100 * KB]), [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_assigned(case):
    arguments, buckets = ASSIGNED[case]
    assert assign_buckets(*arguments) == buckets


def test_without_an_order_the_first_parameter_leaves_last():
    assert unordered_buckets([KB] * 5, [0, 0, 1, 0, 0], [KB, 2 * KB]) == [[4], [2], [1, 3], [0]]
    assert unordered_buckets([KB] * 4, ["a", "b", "a", "b"], [100 * KB]) == [[1, 3], [0, 2]]


def test_torchs_order_is_by_what_is_full_and_then_the_kind_that_came_last():
    kinds = ["a", "b", "a", "c", "a", "b"]
    assert torchs_buckets([KB] * 6, kinds, range(6), [2 * KB]) == [[0, 2], [1, 5], [3], [4]]
    assert torchs_buckets([KB] * 6, kinds, range(6), [9 * KB]) == [[3], [1, 5], [0, 2, 4]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_model(data):
    count = data.draw(st.integers(1, 30))
    nbytes = data.draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    caps = data.draw(st.lists(st.integers(1, 8000), min_size=1, max_size=3))
    last = data.draw(st.none() | st.integers(1, 8000))
    buckets = assign_buckets(nbytes, kinds, order, caps, last)
    check_buckets(buckets, [f"p{i}" for i in range(count)], kinds)
    position = {index: i for i, index in enumerate(order)}
    ends = [max(position[i] for i in bucket) for bucket in buckets]
    assert ends == sorted(ends)
    for bucket in buckets:
        places = [position[i] for i in bucket]
        assert places == sorted(places)
        # Without the parameter that filled it, and the small ones that it still took, a bucket was still open.
        cap, sizes = max([*caps, last or 0]), [nbytes[i] for i in bucket]
        if len(caps) > 1:
            assert sum(sizes[:-1]) < cap
        else:
            assert any(sum(sizes[:k]) <= cap / 16 and sum(sizes[k + 1 :]) < cap for k in range(len(sizes)))


def test_ready_order_lists_absent_parameters_apart():
    assert ready_order([30, -1, 10, 20, -1]) == ([2, 3, 0], [4, 1])


@pytest.mark.parametrize(
    "buckets, message",
    [
        ([[0], [0, 1]], "exactly one bucket.*'a'"),
        ([[0]], "exactly one bucket.*'b'"),
        ([[0, 1]], "one dtype and device"),
        ([[0], [1], [7]], "index 7"),
    ],
)
def test_wrong_buckets_are_refused(buckets, message):
    with pytest.raises(ValueError, match=message):
        check_buckets(buckets, ["a", "b"], ["x", "y"])


def test_default_buckets_are_a_tenth_of_the_model():
    """Between 2 and 25 MiB, where nobody chose; a number or a list counts as it is."""
    config = functools.partial(_config, bucket_cap_mb_list=None)
    assert [config(bucket_cap_mb=None).caps_for(mib << 20)[0] >> 20 for mib in (1, 40, 100, 1000)] == [2, 4, 10, 25]
    assert config(bucket_cap_mb=25).caps_for(40 << 20) == (25 << 20,)
    assert config(bucket_cap_mb="auto").caps_for(40 << 20) == (4 << 20,), "it begins with the default"
    assert _config(bucket_cap_mb=None, bucket_cap_mb_list=[1, 8]).caps_for(40 << 20) == (1 << 20, 8 << 20)


def _config(**given):
    flags = (
        "gradient_as_bucket_view",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
        "lazy_bucket_allocation",
    )
    return make_config(**dict.fromkeys(flags, False) | given)


class _Group:
    def size(self):
        return 2

    def rank(self):
        return 1


def test_something_else_than_an_order_is_named(monkeypatch):
    """A forward that rank 0 alone runs broadcasts buffers, which rank 1 takes for the order that it waits for."""
    buffers = torch.tensor([5, 2, 0, 7])
    monkeypatch.setattr(messages, "broadcast_from", lambda group, message, *_: message.copy_(buffers))
    with pytest.raises(RuntimeError, match="rank 1 got something else.*Run it on all ranks"):
        agree_on_order(Agreed([1], [0], as_torch=False, token=3), _Group(), "cpu")
