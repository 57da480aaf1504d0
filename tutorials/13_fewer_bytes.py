"""13. Fewer bytes: when they pay, and what they cost.

    python tutorials/13_fewer_bytes.py

Over a slow network a step waits for bytes. wire="bf16" sends half of float32's, wire="int8" a quarter. Below: how
many bytes that is, what rounding does to one step, why error feedback makes up for it, and how to tell whether it
pays.
"""

import copy
import statistics
import time

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import minddp

RANKS = 2
WIRES = {"float32": None, "bf16": "bf16", "fp16": "fp16", "int8": "int8"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, torch.sin(x.sum(1, keepdim=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, wanted = batch
    return (model(x) - wanted).square().mean()


# %% [markdown]
# ## Bytes
#
# What is sent is what the reducer's buckets hold. Vectors (biases here) travel as they are: they are few, and often
# of another magnitude. An int8 block is 256 codes and one float32 scale: 260 bytes for what were 1,024.

# %%


def one_step(rank: int, world_size: int) -> dict[str, tuple[int, Tensor, Tensor]]:
    """By wire: bytes of all buckets; the gradient of one weight; and of one bias."""
    found = {}
    for name, wire in WIRES.items():
        net = minddp.DistributedDataParallel(make_model(), wire=wire)
        loss_of(net, make_batch(rank, 0)).backward()
        found[name] = (sum(net.reducer.bucket_nbytes()), net.module[2].weight.grad, net.module[2].bias.grad)
    return found


def bytes_and_rounding() -> None:
    ranks = run_ranks(one_step, RANKS)
    found = ranks[0]
    whole, exact, exact_bias = found["float32"]
    print("1. One step: bytes in buckets, and how far a weight's averaged gradient is from float32's")
    for name, (nbytes, weight, bias) in found.items():
        off = ((weight - exact).norm() / exact.norm()).item()
        print(f"   {name:8} {nbytes:9,} bytes = {nbytes / whole:.2f}   off by {off:.1%}")
        assert torch.equal(bias, exact_bias), "vectors travel as they are"
        assert all(torch.equal(other[name][1], weight) for other in ranks), "all ranks have the same bits"
    assert found["int8"][0] < 0.27 * whole
    print("   Biases have float32's bits, and all ranks have the same bits of everything.\n")


# %% [markdown]
# ## Error feedback
#
# Rounding loses what is small beside the largest number of its block, and it loses the same in every step. So each
# rank keeps what it has lost, and adds it to what it sends next. Nothing is lost for good: it arrives later.

# %%

STEPS = 60


def same_gradient_again(rank: int, world_size: int) -> dict[str, list[float]]:
    """How far the sum of what has arrived is from the sum of the averages, after 1, 10 and all steps."""
    found = {}
    for name, feeds_back in (("without", False), ("with", True)):
        layer = nn.Linear(256, 4, bias=False)
        net = minddp.DistributedDataParallel(layer, wire=minddp.Wire("int8", error_feedback=feeds_back))
        slope = torch.full((256,), 1e-3)
        slope[0] = 1.0  # a step of a code is 1/127: the others are smaller
        arrived = torch.zeros(4, 256)
        row = []
        for step in range(1, STEPS + 1):
            net.zero_grad()
            net(slope).sum().backward()
            arrived += layer.weight.grad
            if step in (1, 10, STEPS):
                row.append((arrived[0, 1] / step).item())
        found[name] = row
    return found


def feedback() -> None:
    print("2. A gradient of 0.001 in a block whose largest is 1: what arrives in a step, on average")
    found = run_ranks(same_gradient_again, RANKS)[0]
    for name, (first, tenth, last) in found.items():
        print(f"   {name:7} error feedback: {first:.5f} after 1 step, {tenth:.5f} after 10, {last:.5f} after {STEPS}")
    assert found["without"] == [0, 0, 0]
    assert abs(found["with"][-1] - 1e-3) < 2e-4
    print()


# %% [markdown]
# ## Training
#
# The price is paid in loss, so that is where to look. Here all four end alike.

# %%


def train(rank: int, world_size: int, wire: str | None) -> list[float]:
    """The loss in every 50th step."""
    net = minddp.DistributedDataParallel(make_model(), wire=wire)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    for step in range(301):
        optimizer.zero_grad()
        loss = loss_of(net, make_batch(rank, step % 20))
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            losses.append(loss.item())
    return losses


def training() -> None:
    print("3. Training for 300 steps: the loss on rank 0 after 0, 100, 200 and 300")
    found = {name: run_ranks(train, RANKS, wire)[0] for name, wire in WIRES.items()}
    for name, losses in found.items():
        print(f"   {name:8} " + "  ".join(f"loss {loss:.4f}" for loss in losses))
        assert losses[-1] < 0.5 * losses[0]
        assert abs(losses[-1] - found["float32"][-1]) < 0.05
    print()


# %% [markdown]
# ## When it pays
#
# Only where a step waits for bytes. Measure your own: minddp.last_step(ddp) says what backward has not hidden. Below,
# the four wires take turns in one process, so that none pays for the warm-up, and noise hits all of them. On one
# machine, as here, what is exposed is mostly a wait for the other rank's processor, which packs and unpacks, too.
# Over a shaped link, beside torch's class and hooks: benchmarks/wire.py.

# %%


def exposed(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """By wire: medians of a step, and of its communication that backward has not hidden, in ms."""
    x = torch.randn(16, 512)
    layers = [nn.Linear(512, 512) for _ in range(6)]
    models = {name: nn.Sequential(*copy.deepcopy(layers)) for name in WIRES}
    nets = {name: minddp.DistributedDataParallel(models[name], wire=wire) for name, wire in WIRES.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in nets}
    for _ in range(15):
        for name, net in nets.items():
            net.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            net(x).sum().backward()
            seconds = time.perf_counter() - begin
            times[name].append((seconds * 1e3, minddp.last_step(net).exposed_seconds * 1e3))
    return {name: tuple(statistics.median(column) for column in zip(*rows[3:])) for name, rows in times.items()}


def when_it_pays() -> None:
    print("4. A step over loopback, and what of it waits for other ranks: medians of 12, the wires in turns")
    found = run_ranks(exposed, RANKS)[0]
    for name, (step, wait) in found.items():
        print(f"   {name:8} {step:6.1f} ms, {wait:5.1f} ms of it exposed")
    (plain, wait), (small, _) = found["float32"], found["int8"]
    print(f"   A quarter of the bytes: {small - plain:+.1f} ms. Packing them costs time, and no more can be gained")
    print(f"   than the {wait:.1f} ms that float32 exposes. Over loopback most of it is no wait for bytes.")


if __name__ == "__main__":
    bytes_and_rounding()
    feedback()
    training()
    when_it_pays()
