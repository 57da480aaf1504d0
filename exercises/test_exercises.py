"""The tests of the exercises. SOLUTIONS=1 tests the solutions in the place of what you have written.

A failed test says what the usual mistake is that gives this answer, where it knows one.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

if os.environ.get("SOLUTIONS", "") not in ("", "0"):  # 1, or a folder
    sys.path.insert(0, str(Path(__file__).with_name("solutions")))
    sys.path.insert(0, os.environ["SOLUTIONS"])
    import solutions as exercises
else:
    import exercises

from minddp.buckets import assign_buckets

sys.path.append(str(Path(__file__).resolve().parents[1] / "tutorials"))
from ranks import run_ranks


def check(found, expected, usual=()):
    """``usual``: pairs of a wrong answer and what gives it."""
    hint = next((words for wrong, words in usual if found == wrong), "")
    assert found == expected, hint or f"{found}, where {expected} is right"


def _averaged(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.manual_seed(1 + rank)
    model(torch.randn(5, 3)).square().sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    sums = [gradient.clone() for gradient in own]
    for gradient in sums:
        dist.all_reduce(gradient)
    calls = []
    real = dist.all_reduce

    def counted(*arguments, **keywords):
        calls.append(1)
        return real(*arguments, **keywords)

    dist.all_reduce = counted
    try:
        exercises.average_gradients(model)
    finally:
        dist.all_reduce = real
    kinds = {"mean": [each / world_size for each in sums], "sum": sums, "own": own, "divided": [g / 2 for g in own]}
    grads = [parameter.grad for parameter in model.parameters()]
    fits = [kind for kind, other in kinds.items() if all(map(torch.allclose, grads, other))]
    return len(calls), [*fits, "other"][0]


def test_average_gradients():
    for found in run_ranks(_averaged, 2):
        check(found, (1, "mean"), [
            ((4, "mean"), "your gradients are right, but took 4 all-reduces: put them in one buffer (torch.cat)"),
            ((1, "sum"), "each .grad is the sum over ranks: divide it by their number"),
            ((4, "sum"), "each .grad is the sum over ranks, by 4 all-reduces: divide it, and put all in one buffer"),
            ((1, "own"), "each .grad is this rank's own still: the buffer is a copy, and its parts must go back"),
            ((0, "own"), "nothing was all-reduced"),
            ((1, "divided"), "each .grad is this rank's own, divided: the sum in the buffer must go back to it"),
        ])  # fmt: skip


def test_cut():
    check(exercises.cut([4, 4, 4], 8), [[2], [1, 0]], [
        ([[2, 1], [0]], "filled from the last parameter on. The reducer fills from the first, so that what is left "
                        "over, and not full, leaves first, and not last, where nothing hides it"),
        ([[0, 1], [2]], "in the order of filling. The last parameters' gradients come first: list them first"),
        ([[1, 0], [2]], "the last parameters' gradients come first: list their bucket first"),
        ([[2], [0, 1]], "the buckets are right; inside of a bucket, too, the last parameter comes first"),
    ])  # fmt: skip
    check(exercises.cut([4, 100, 4], 8), [[2], [1, 0]], [
        ([[2], [1], [0]], "you close a bucket before it holds more than the cap; it closes once it holds as much"),
    ])  # fmt: skip
    check(exercises.cut([64, 2, 64, 2, 2], 64), [[4, 3, 2], [1, 0]], [
        ([[4, 3], [2, 1], [0]], "a closed bucket still takes what follows, up to a sixteenth of the cap. A bias "
                                "comes just behind the weight that closed it, and would hold up the next one"),
    ])  # fmt: skip
    check(exercises.cut([], 8), [], [([[]], "no parameters: no bucket, not an empty one")])
    torch.manual_seed(0)
    for _ in range(50):
        nbytes = torch.randint(1, 60, (12,)).tolist()
        theirs = assign_buckets(nbytes, [0] * 12, list(reversed(range(12))), [64])
        assert exercises.cut(nbytes, 64) == theirs, f"cut({nbytes}, 64); the right side is the reducer's"


def test_launch_times():
    check(exercises.launch_times([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0], [
        ([1.0, 3.0, 6.0], "a bucket leaves when the one before has left; it need not have arrived"),
    ])  # fmt: skip
    check(exercises.launch_times([3.0, 1.0, 2.0, 5.0]), [3.0, 3.0, 3.0, 5.0], [
        ([3.0, 1.0, 2.0, 5.0], "bucket 1 has left before bucket 0: another rank would add it to its bucket 0"),
        ([1.0, 2.0, 3.0, 5.0], "sorted: bucket 0 has left at 1.0, but is complete at 3.0"),
        ([3.0, 3.0, 2.0, 5.0], "bucket 2 waits for when bucket 1 has left, not for when it is complete"),
    ])  # fmt: skip
    check(exercises.launch_times([]), [])


def test_taking_part():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].bias.requires_grad_(False)
    loss = model["c"](model["a"](torch.ones(1, 2))).sum()
    found = exercises.taking_part(loss, model)
    assert all(parameter.grad is None for parameter in model.parameters()), "you ran backward: follow next_functions"
    check(found, {"a.weight", "a.bias", "c.weight"}, [
        ({name for name, _ in model.named_parameters()}, "these are all parameters: the graph hangs on loss.grad_fn"),
        ({"a.weight", "a.bias", "b.weight", "b.bias", "c.weight"}, "b.weight requires a gradient and gets none"),
        ({"c.weight"}, "you stop too early: follow next_functions from each node that you find"),
        (set(), "the nodes that have a `variable` are those at the graph's ends; compare tensors by `is`"),
    ])  # fmt: skip


def _gradient(rank, world_size):
    x = torch.tensor(2.0 + rank, requires_grad=True)
    y = exercises.AllReduceSum.apply(x)
    ((rank + 1) * y**2).backward()
    return y.item(), x.grad.item(), x.item() == 2.0 + rank


def test_all_reduce_sum():
    """The sum of the losses is (1 + 2) * (x0 + x1)**2, with slope 2 * 3 * 5 in both."""
    found = run_ranks(_gradient, 2)
    assert all(kept for *_, kept in found), "x itself has changed: all_reduce works in place, so clone it before"
    check([(y, slope) for y, slope, _ in found], [(5.0, 30.0)] * 2, [
        ([(5.0, 10.0), (5.0, 20.0)], "10, 20: only your own loss's part; the other rank's depends on your x, too"),
        ([(5.0, 15.0)] * 2, "15 is the mean of both losses' parts; the gradient of their sum is 30"),
        ([(2.0, 4.0), (3.0, 12.0)], "forward returns this rank's own x: nothing was added up"),
    ])  # fmt: skip


def _ring(rank, world_size):
    x = torch.arange(7, dtype=torch.float64) * (rank + 1)
    sent = []
    originals = dist.send, dist.isend

    def counting(real):
        def send(tensor, *arguments, **keywords):
            sent.append(tensor.numel())
            return real(tensor, *arguments, **keywords)

        return send

    dist.send, dist.isend = map(counting, originals)
    try:
        exercises.ring_all_reduce(x)
    finally:
        dist.send, dist.isend = originals
    return x, sum(sent)


def test_ring_all_reduce():
    results = run_ranks(_ring, 3)
    sums = [x for x, _ in results]
    whole = [[bool(x[i] == 6 * i) for x in sums].count(True) for i in range(1, 7)]
    assert whole != [1] * 6, "each chunk is whole on one rank now: as many steps again carry the results round"
    assert whole == [3] * 6, f"elements 1 to 6 are the sum of all ranks on so many ranks: {whole}"
    for _, sent in results:
        assert sent > 0, "nothing was sent by dist.send or dist.isend"
        assert sent != 14, "14 elements: the whole tensor twice; a third of it in each of four steps is enough"
        assert sent <= 2 * 2 * 3, f"{sent} elements: each rank needs to send 2 (ranks - 1) chunks of a third"
