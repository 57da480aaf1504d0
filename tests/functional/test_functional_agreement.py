"""The pure parts of agreeing: headers, what differs, and the texts of errors."""

import pytest
import torch

from minddp.functional.agreement import NO_GRAD, REQUIRED, Call, Header, disagreement, message
from minddp.functional.arguments import row_splits
from minddp.functional.transport import even_counts, offsets

CALL = Call("all_reduce", op="sum", loss="per_rank", dtype=torch.float32, device="cpu", shape=(2, 3))


def _headers(*calls):
    return [Header.decode(call.encode()) for call in calls]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1,) * 15, None])
def test_a_header_keeps_the_shape(shape):
    values = Call("gather", dtype=torch.int8, device="cpu", shape=shape).encode()
    assert len(values) == len(CALL.encode())  # every header has the same size on the wire
    assert Header.decode(values).shape == shape


def test_equal_calls_agree_and_so_do_receivers_without_a_tensor():
    assert disagreement(_headers(CALL, CALL)) == ""
    root = Call("broadcast", root=0, dtype=torch.float16, device="cpu", shape=(4,), grad=REQUIRED)
    assert disagreement(_headers(root, Call("broadcast", root=0))) == ""


def test_rows_may_differ_where_the_collective_allows_it():
    def rows(count, last=3):
        return Call("all_gather", dtype=torch.float32, shape=(count, last), same_shape=False)

    assert disagreement(_headers(rows(0), rows(5))) == ""
    assert disagreement(_headers(rows(0), rows(5, last=2))) == "the shape"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"op": "max"}, "the op"),
        ({"dtype": torch.float64}, "the dtype"),
        ({"shape": (2, 4)}, "the shape"),
        ({"shape": (2,)}, "the number of dimensions"),
        ({"collective": "reduce"}, "which collective comes now"),
        ({"root": 1}, "the root rank"),
        ({"rows": (1, 1)}, "the splits"),
        ({"error": "x must be a tensor"}, "arguments"),
    ],
)
def test_what_differs_is_named(changed, problem):
    fields = {name: getattr(CALL, name) for name in CALL.__dataclass_fields__}
    assert disagreement(_headers(CALL, Call(**(fields | changed)))) == problem


def test_recording_gradients_on_one_rank_and_forbidding_them_on_another_differs():
    calls = [Call("all_reduce", dtype=torch.float32, shape=(1,), grad=grad) for grad in (NO_GRAD, REQUIRED)]
    assert disagreement(_headers(*calls)) == "whether gradients are recorded"


def test_another_librarys_bytes_are_recognized():
    assert "another library" in disagreement([Header.decode([7] * 11 + [0] * 16)])


def test_the_text_puts_ranks_that_say_the_same_together():
    text = message("the op", ["sum", "max", "sum"])
    assert text.splitlines()[1:] == ["  ranks 0, 2: sum", "  rank 1: max"]
    assert message("arguments", ["bad", "bad"]).endswith("  every rank: bad")


def test_shares_and_offsets():
    assert even_counts(7, 3) == [3, 2, 2]
    assert even_counts(1, 3) == [1, 0, 0]
    assert offsets([3, 0, 2]) == [0, 3, 3, 5]
    assert row_splits(torch.ones(4), None, 2) == (2, 2)
    with pytest.raises(ValueError, match="pass splits="):
        row_splits(torch.ones(5), None, 2)
    with pytest.raises(ValueError, match="add up to the 5 rows"):
        row_splits(torch.ones(5), [6, -1], 2)
