"""Replays in which collectives take processor time from backward, against arithmetic, and back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.planner import LinearCost, bucket_spans
from minddp.planner.backward_profile import BackwardProfile
from minddp.planner.contention import FREE, Transfer, replay, transfers, without_transfers

ALONE = BackwardProfile([2.0, 8.0], [4, 4], 10.0)
COST, TAKEN = LinearCost(0.0, 1.0), LinearCost(0.0, 0.5)  # 4 seconds, of which backward loses 2


def test_a_collective_takes_its_part_of_backward():
    """The first runs from 2 to 6, where backward gets half: 8 comes at 10. The second takes the other 2 of its 4."""
    spans, backward = replay(ALONE, [[0], [1]], COST, TAKEN)
    assert spans == [Transfer(2, 6, 2), Transfer(10, 14, 2)]
    assert backward == 14
    spans, backward = replay(ALONE, [[0, 1]], COST, TAKEN)  # it begins at 8, and takes one of each two seconds left
    assert (spans, backward) == ([Transfer(8, 16, 4)], 12)


def test_what_was_measured_is_given_back():
    measured = BackwardProfile([2.0, 10.0], [4, 4], 14.0, 1.0, 0.5)
    beside = transfers([(4, 2.0, 6.0), (4, 10.0, 14.0)], TAKEN)
    assert without_transfers(measured, beside) == BackwardProfile([2.0, 8.0], [4, 4], 10.0, 1.0, 0.5)
    # Launched while another runs: one after the other. One whose end was not seen counts for nothing.
    assert transfers([(4, 2.0, 6.0), (4, 3.0, 9.0), (4, 5.0, -1.0)], TAKEN) == [Transfer(2, 6, 2), Transfer(6, 9, 2)]


def test_backward_always_gets_on():
    spans, backward = replay(ALONE, [[0, 1]], COST, LinearCost(100.0, 0.0))
    assert spans == [Transfer(8, 16, pytest.approx(7.2))]
    assert backward == pytest.approx(17.2)  # 0.8 until 16, then the rest


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 8))
def test_of_any_buckets(gradients, taken):
    """Where nothing is taken it is the planner's replay. Else backward ends later by what is taken, at most."""
    ready = list(itertools.accumulate(float(pause) for pause, _ in gradients))
    alone = BackwardProfile(ready, [nbytes for _, nbytes in gradients], ready[-1] + 3)
    buckets = [[position] for position in range(len(ready))]
    spans = bucket_spans(buckets, ready, alone.nbytes, COST)
    assert [span[:2] for span in replay(alone, buckets, COST, FREE)[0]] == spans
    found, backward = replay(alone, buckets, COST, LinearCost(0.0, taken / 10))
    assert all(later.begin >= sooner[0] for later, sooner in zip(found, spans))
    lost = backward - alone.backward_seconds
    assert -1e-9 <= lost <= sum(span.taken for span in found if span.begin < backward) + 1e-9
