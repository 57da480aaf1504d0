"""Random operations on any data, on the shared-memory backend and on Gloo: equal results.

All-reduces and barriers pass through shared memory, broadcasts and all-gathers beside them through Gloo.

``MINDDP_SHM_RANDOM_OPS=100000`` makes that many, in all, over 2 to 5 ranks; ``MINDDP_SHM_RANDOM_SEED`` draws others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks_pool import run_ranks

WORLD_SIZES = (2, 3, 4, 5)
OPERATIONS = int(os.environ.get("MINDDP_SHM_RANDOM_OPS", "4000"))
SEED = int(os.environ.get("MINDDP_SHM_RANDOM_SEED", "13"))
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
REDUCTIONS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
MOST_IN_FLIGHT = 5

Call = tuple[Any, list[torch.Tensor]]  # the work, and the tensors that it writes to


class Operations:
    """Draws the same operations on every rank; each rank fills in its own data."""

    def __init__(self, rank: int, world_size: int, seed: int):
        self.rank, self.world_size = rank, world_size
        self.draw = random.Random(seed)  # the same on all ranks
        self.data = torch.Generator().manual_seed(seed * 100 + rank)  # this rank's own
        self.group = dist.new_group(backend="shm")

    def numel(self) -> int:
        largest = self.draw.choices([8, 3000, 9000, 80_000, 700_000], [30, 30, 25, 14, 1])[0]
        return self.draw.randint(0, largest)

    def tensor(self, numel: int, dtype: torch.dtype, layout: str = "plain") -> torch.Tensor:
        """Small whole numbers, which all orders of an addition or a multiplication treat alike."""
        values = torch.randint(0, 4, (numel,), generator=self.data).to(dtype)
        if layout == "strided":
            return torch.zeros(numel, 2, dtype=dtype)[:, 1].copy_(values)
        return values

    def next(self) -> Callable[[Any, bool], Call]:
        """The next operation, which can be called on one group and then on the other."""
        name = self.draw.choice(["all_reduce"] * 6 + ["broadcast", "all_gather_into_tensor", "barrier"])
        numel, dtype = self.numel(), self.draw.choice(DTYPES)
        root, op = self.draw.randrange(self.world_size), self.draw.choice(REDUCTIONS)
        layout = self.draw.choice(["plain", "strided"]) if name == "all_reduce" else "plain"
        return getattr(self, name)(numel, dtype, layout, root, op)

    def in_place(self, mine, collective):
        def call(group, ours):
            tensor = mine if ours else mine.clone()
            return collective(tensor, group), [tensor]

        return call

    def all_reduce(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)
        return self.in_place(mine, lambda tensor, group: dist.all_reduce(tensor, op, group, async_op=True))

    def broadcast(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)
        return self.in_place(mine, lambda tensor, group: dist.broadcast(tensor, root, group, async_op=True))

    def all_gather_into_tensor(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype)

        def call(group, ours):
            output = torch.zeros(numel * self.world_size, dtype=dtype)
            return dist.all_gather_into_tensor(output, mine, group=group, async_op=True), [output]

        return call

    def barrier(self, numel, dtype, layout, root, op):
        return lambda group, ours: (dist.barrier(group, async_op=True), [])


def check_random(rank: int, world_size: int, count: int, seed: int) -> int:
    operations = Operations(rank, world_size, seed)
    names: list[str] = []
    in_flight: list[tuple[int, Any, list[torch.Tensor], list[torch.Tensor]]] = []

    def check(entry: tuple[int, Any, list[torch.Tensor], list[torch.Tensor]]) -> None:
        number, work, outputs, expected = entry
        if work is not None:
            work.wait()
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(output, right), (
                f"{names[number]}, operation {number} of seed {seed}, {output.dtype}, {output.shape}: "
                f"{output.flatten()[:9]} is not {right.flatten()[:9]}"
            )

    for number in range(count):
        call = operations.next()
        names.append(call.__qualname__)
        work, expected = call(dist.group.WORLD, False)
        if work is not None:
            work.wait()
        in_flight.append((number, *call(operations.group, True), expected))
        while len(in_flight) > operations.draw.randint(0, MOST_IN_FLIGHT):
            check(in_flight.pop(operations.draw.randrange(len(in_flight))))
    for entry in in_flight:
        check(entry)
    return count


@pytest.mark.timeout(max(1800, OPERATIONS // 10))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_operations_are_gloos(world_size: int) -> None:
    count = OPERATIONS // len(WORLD_SIZES)
    run_ranks(check_random, world_size, count, SEED + world_size, timeout=max(120, count / 5))
