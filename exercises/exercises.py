"""Exercises: write what is missing. `make exercises` tests it; exercises/README.md says what to read before."""

import torch
from torch import Tensor, nn


def average_gradients(model: nn.Module) -> None:
    """1. After a backward on each rank: make every ``.grad`` the mean over ranks, by one allreduce."""
    raise NotImplementedError("exercise 1")


def cut(nbytes: list[int], cap: int) -> list[list[int]]:
    """2. Indices by bucket, in the order in which the buckets leave: the reducer's own rule.

    Buckets are filled from the first parameter on. A bucket closes once it holds ``cap`` bytes or more. It still
    takes the parameters right behind it, as long as they have at most ``cap / 16`` bytes together. Gradients come
    from the last parameter to the first, so buckets, and the indices in each, are listed from the last to the first.
    ``cut([4, 4, 4], 8) == [[2], [1, 0]]``. No parameters: no bucket.
    """
    raise NotImplementedError("exercise 2")


def launch_times(ready: list[float]) -> list[float]:
    """3. When each bucket leaves, if bucket i is complete at ``ready[i]``, and buckets leave in order.

    ``launch_times([3.0, 1.0]) == [3.0, 3.0]``.
    """
    raise NotImplementedError("exercise 3")


def taking_part(loss: Tensor, model: nn.Module) -> set[str]:
    """4. The names of the parameters that ``loss.backward()`` will reach, found without running it."""
    raise NotImplementedError("exercise 4")


class AllReduceSum(torch.autograd.Function):
    """5. The sum of ``x`` over ranks. Every rank has a loss of its own; the sum of these losses is differentiated."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        raise NotImplementedError("exercise 5")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise NotImplementedError("exercise 5")


def ring_all_reduce(x: Tensor) -> None:
    """6. The sum over ranks, in place, by sends to the right neighbour only: some twice the size of ``x`` in all."""
    raise NotImplementedError("exercise 6")
