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


def test_one_cap_leaves_the_rest_in_the_first_bucket():
    assert assign_buckets([KB] * 5, [0] * 5, [4, 3, 2, 1, 0], [2 * KB]) == [[4], [3, 2], [1, 0]]


def test_the_last_bucket_is_the_small_one():
    buckets = assign_buckets([KB] * 6, [0] * 6, range(6), [4 * KB], last_cap=KB)
    assert buckets == [[0], [1, 2, 3, 4], [5]]


def test_a_list_of_caps_counts_in_launch_order_and_repeats_its_last():
    buckets = assign_buckets([KB] * 6, [0] * 6, range(6), [KB, 2 * KB])
    assert buckets == [[0], [1, 2], [3, 4], [5]]
    assert assign_buckets([KB] * 6, [0, 1] * 3, range(6), [KB, 2 * KB]) == [[0], [1], [2, 4], [3, 5]], "by kind"


def test_a_bucket_exceeds_its_cap_by_less_than_a_parameter():
    assert assign_buckets([10 * KB, 1], [0, 0], [0, 1], [KB]) == [[0, 1]]
    assert assign_buckets([KB, 10 * KB], [0, 0], [0, 1], [KB]) == [[0], [1]]


def test_a_bias_shares_the_bucket_of_the_weight_that_it_arrives_before():
    bias, weight = KB // 64, 10 * KB
    assert assign_buckets([bias, weight] * 3, [0] * 6, range(6), [KB]) == [[0, 1], [2, 3], [4, 5]]
    # What is large in comparison with the cap does not; what is small does only up to a sixteenth of it.
    assert assign_buckets([KB, weight] * 2, [0] * 4, range(4), [KB]) == [[0], [1], [2], [3]]
    assert assign_buckets([bias] * 6 + [weight], [0] * 7, range(7), [KB]) == [[0, 1], [2, 3, 4, 5, 6]]
    # Nor does another kind's, and in a list of caps each closes where it says.
    assert assign_buckets([bias, weight], [0, 1], range(2), [KB]) == [[0], [1]]
    assert assign_buckets([weight, bias, weight], [0] * 3, range(3), [KB, KB]) == [[0], [1, 2]]


def test_kinds_do_not_mix_and_buckets_come_as_they_complete():
    buckets = assign_buckets([KB] * 4, ["a", "b", "a", "b"], range(4), [100 * KB])
    assert buckets == [[0, 2], [1, 3]]


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
