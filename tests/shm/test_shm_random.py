"""Random operations, of any kind and on any data, on the shared-memory backend and on Gloo: equal results.

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

import minddp.shm
from minddp.testing import run_ranks

WORLD_SIZES = (2, 3, 4, 5)
OPERATIONS = int(os.environ.get("MINDDP_SHM_RANDOM_OPS", "4000"))
SEED = int(os.environ.get("MINDDP_SHM_RANDOM_SEED", "13"))
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
REDUCTIONS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
MOST_IN_FLIGHT = 5

Call = tuple[Any, list[torch.Tensor]]  # the work, and the tensors that it writes to


def for_group(tensor: torch.Tensor, ours: bool) -> torch.Tensor:
    """Gloo's scatter passes over strides without a word."""
    return tensor if ours else tensor.contiguous()


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
        if layout == "shared":
            return minddp.shm.empty(numel, dtype=dtype, group=self.group).copy_(values)
        if layout == "strided":
            return torch.zeros(numel, 2, dtype=dtype)[:, 1].copy_(values)
        return values

    def next(self) -> Callable[[Any, bool], Call]:
        """The next operation, which can be called on one group and then on the other."""
        name = self.draw.choice([
            "all_reduce", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather",
            "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "messages", "barrier",
        ])  # fmt: skip
        numel, dtype = self.numel(), self.draw.choice(DTYPES)
        if name in ("gather", "messages"):  # Gloo refuses to gather nothing
            numel = max(1, numel)
        root, op = self.draw.randrange(self.world_size), self.draw.choice(REDUCTIONS)
        layout = self.draw.choice(["plain", "plain", "shared", "strided"])
        return getattr(self, name)(numel, dtype, layout, root, op)

    def in_place(self, mine, collective, written=True):
        def call(group, ours):
            tensor = mine if ours else mine.clone()
            return collective(tensor, group), [tensor] if written else []

        return call

    def all_reduce(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)
        return self.in_place(mine, lambda tensor, group: dist.all_reduce(tensor, op, group, async_op=True))

    def broadcast(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)
        return self.in_place(mine, lambda tensor, group: dist.broadcast(tensor, root, group, async_op=True))

    def reduce(self, numel, dtype, layout, root, op):
        mine, written = self.tensor(numel, dtype, layout), self.rank == root  # elsewhere Gloo leaves partial results
        return self.in_place(mine, lambda tensor, group: dist.reduce(tensor, root, op, group, async_op=True), written)

    def gather(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)

        def call(group, ours):
            outputs = [torch.zeros_like(mine) for _ in range(self.world_size)] if self.rank == root else []
            return dist.gather(for_group(mine, ours), outputs or None, root, group=group, async_op=True), outputs

        return call

    def scatter(self, numel, dtype, layout, root, op):
        inputs = [self.tensor(numel, dtype, layout) for _ in range(self.world_size)]

        def call(group, ours):
            output = torch.zeros(numel, dtype=dtype)
            source = [for_group(value, ours) for value in inputs] if self.rank == root else None
            return dist.scatter(output, source, root, group=group, async_op=True), [output]

        return call

    def all_gather(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype, layout)

        def call(group, ours):
            outputs = [torch.zeros(numel, dtype=dtype) for _ in range(self.world_size)]
            return dist.all_gather(outputs, for_group(mine, ours), group=group, async_op=True), outputs

        return call

    def all_gather_into_tensor(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel, dtype)

        def call(group, ours):
            output = torch.zeros(numel * self.world_size, dtype=dtype)
            return dist.all_gather_into_tensor(output, mine, group=group, async_op=True), [output]

        return call

    def reduce_scatter_tensor(self, numel, dtype, layout, root, op):
        mine = self.tensor(numel * self.world_size, dtype)

        def call(group, ours):
            if ours:
                output = torch.zeros(numel, dtype=dtype)
                return dist.reduce_scatter_tensor(output, mine, op, group=group, async_op=True), [output]
            whole = mine.clone()  # Gloo has sums alone
            work = dist.all_reduce(whole, op, group=group, async_op=True)
            return work, [whole[self.rank * numel : (self.rank + 1) * numel]]

        return call

    def all_to_all_single(self, numel, dtype, layout, root, op):
        ranks = range(self.world_size)
        rows = [[self.draw.randint(0, 1 + numel // 4) for _ in ranks] for _ in ranks]
        to, from_all = rows[self.rank], [row[self.rank] for row in rows]
        mine = self.tensor(sum(to), dtype)

        def call(group, ours):
            output = torch.zeros(sum(from_all), dtype=dtype)
            return dist.all_to_all_single(output, mine, from_all, to, group=group, async_op=True), [output]

        return call

    def messages(self, numel, dtype, layout, root, op):
        """Some tags around the ring, received in another order; more than a table holds, now and then."""
        count = self.draw.choice([1, 3, 3, 80])
        order = self.draw.sample(range(count), count)
        numel = min(numel, 5000 if count == 80 else numel)
        mine = [self.tensor(numel, dtype) for _ in range(count)]

        def call(group, ours):
            after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
            sends = [dist.isend(tensor, after, group, tag=i) for i, tensor in enumerate(mine)]
            outputs = [torch.zeros(numel, dtype=dtype) for _ in mine]
            receives = [dist.irecv(outputs[i], before, group, tag=i) for i in order]
            for work in [*receives, *sends]:
                work.wait()
            return None, outputs

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
