"""05. Mean or sum? What the averaged gradient is the gradient of, and where the division happens.

    python tutorials/05_mean_or_sum.py

DistributedDataParallel averages gradients over M ranks. Whether that is the gradient you want depends on the
loss. Below, g is the gradient of one process that holds the whole batch, and every "= g" is
checked, to rounding.
"""

import time

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import minddp

RANKS = 4
ROWS = 16
EQUAL, UNEVEN = (4, 4, 4, 4), (1, 2, 4, 9)  # how the 16 rows are shared out


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def make_batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    return x, x.exp().sum(1, keepdim=True)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def whole_batch_gradient(loss_reduction: str) -> Tensor:
    model, (x, target) = make_model(), make_batch()
    F.mse_loss(model(x), target, reduction=loss_reduction).backward()
    return gradient(model)


# %% [markdown]
# ## Mean and sum
#
# A mean loss over a rank's rows, averaged over ranks, is the mean over all rows, if all ranks have equally many. A
# sum loss, averaged over ranks, is too small by the number of ranks.

# %%


def ddp_gradients(rank: int, world_size: int) -> dict[str, Tensor]:
    """The gradients that every rank ends with, by what was done; and this rank's own, before averaging."""
    x, target = make_batch()

    def run(shares: tuple[int, ...], loss_reduction: str, reduction: str) -> Tensor:
        net = minddp.DistributedDataParallel(make_model(), reduction=reduction)
        mine, wanted = x.split(shares)[rank], target.split(shares)[rank]
        if reduction == "weighted":
            minddp.add_weight(net, len(mine))
        F.mse_loss(net(mine), wanted, reduction=loss_reduction).backward()
        return gradient(net)

    def accumulated() -> Tensor:
        """As the uneven weighted step, in two micro-batches; only the last one communicates."""
        net = minddp.DistributedDataParallel(make_model(), reduction="weighted")
        mine, wanted = x.split(UNEVEN)[rank], target.split(UNEVEN)[rank]
        first = slice(0, len(mine) // 3)  # no rows at all on ranks 0 and 1
        second = slice(len(mine) // 3, None)
        with net.no_sync():
            minddp.add_weight(net, len(mine[first]))
            F.mse_loss(net(mine[first]), wanted[first], reduction="sum").backward()
        minddp.add_weight(net, len(mine[second]))
        F.mse_loss(net(mine[second]), wanted[second], reduction="sum").backward()
        return gradient(net)

    own = make_model()
    F.mse_loss(own(x.split(EQUAL)[rank]), target.split(EQUAL)[rank], reduction="sum").backward()
    return {
        "mean, averaged": run(EQUAL, "mean", "mean"),
        "sum, own": gradient(own),
        "sum, averaged": run(EQUAL, "sum", "mean"),
        "sum, summed": run(EQUAL, "sum", "sum"),
        "uneven, averaged": run(UNEVEN, "mean", "mean"),
        "uneven, weighted": run(UNEVEN, "sum", "weighted"),
        "uneven, weighted, accumulated": accumulated(),
    }


def equal_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def mean_and_sum() -> dict[str, Tensor]:
    ranks = run_ranks(ddp_gradients, RANKS)
    found = ranks[0]
    mean, total = whole_batch_gradient("mean"), whole_batch_gradient("sum")
    assert all(torch.equal(rank[name], found[name]) for rank in ranks for name in found if name != "sum, own")

    print(f"1. One process with {ROWS} rows, and {RANKS} ranks with {ROWS // RANKS} each (norms of gradients)")
    averaged = found["mean, averaged"]
    print(f"   mean loss: one process {mean.norm():8.3f}   averaged {averaged.norm():8.3f}   = g")
    assert equal_up_to_rounding(averaged, mean)

    averaged, summed = found["sum, averaged"], found["sum, summed"]
    print(f"   sum loss:  one process {total.norm():8.3f}   averaged {averaged.norm():8.3f}   = g / {RANKS}")
    print("              the ranks' own, before: " + ", ".join(f"{r['sum, own'].norm():.3f}" for r in ranks))
    print(f'              reduction="sum":     summed {summed.norm():8.3f}   = g\n')
    assert equal_up_to_rounding(averaged, total / RANKS)
    assert equal_up_to_rounding(summed, total)
    return found


# %% [markdown]
# ## Where to divide
#
# Allreduce adds. Dividing before it keeps large numbers in range; dividing after it keeps small ones from
# vanishing. In float16 that decides what arrives.

# %%

LARGE, SMALL = 30_000.0, 2.0**-23  # float16 ends at 65,504 and 2^-24


def half_gradient(rank: int, world_size: int) -> dict[str, list[float]]:
    """Every rank's float16 gradient is (LARGE, SMALL), so the mean is as well."""
    slope = torch.tensor([LARGE, SMALL], dtype=torch.float16)
    ways = {
        "all of it before the sum (default)": {},
        'all of it after the sum (reduction="sum")': {"reduction": "sum"},
        "reduce_dtype=torch.float32": {"reduce_dtype": torch.float32},
    }
    found = {}
    for name, options in ways.items():
        layer = nn.Linear(2, 1, bias=False, dtype=torch.float16)
        net = minddp.DistributedDataParallel(layer, **options)
        net(slope).sum().backward()
        grad = layer.weight.grad.reshape(-1)
        found[name] = (grad / world_size if "reduction" in options else grad).tolist()
    return found


def reductions(rank: int, world_size: int) -> dict[str, float]:
    results = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
        results[name] = value.item()
    return results


def uneven_shares(found: dict[str, Tensor]) -> None:
    mean = whole_batch_gradient("mean")
    print(f"2. Uneven shares, {UNEVEN} rows; mean loss over all {ROWS}: {mean.norm():.3f}")
    averaged = found["uneven, averaged"]
    off = ((averaged - mean).norm() / mean.norm()).item()
    print(f"   average of the ranks' means {averaged.norm():8.3f}   off by {off:.0%}: rank 0's only row counts")
    print(f'   much as rank {RANKS - 1}\'s {UNEVEN[-1]}. Losses summed, add_weight(rows), reduction="weighted":')
    assert off > 0.05
    for name, label in (("uneven, weighted", "one step"), ("uneven, weighted, accumulated", "accumulated")):
        difference = (found[name] - mean).abs().max().item()
        print(f"   {label:27} {found[name].norm():8.3f}   = g, largest difference {difference:.0e}")
        assert equal_up_to_rounding(found[name], mean)
    print()


def where_to_divide() -> None:
    print("3. Allreduce adds; the mean is a sum and a division")
    results = run_ranks(reductions, RANKS)[0]
    print(f"   of 1, 2, 3, 4: {', '.join(f'{name} {value:g}' for name, value in results.items())}")
    assert results == {"SUM": 10, "PRODUCT": 24, "MIN": 1, "MAX": 4}

    print(f"   A float16 gradient ({LARGE:,.0f}, {SMALL:.2e}) on each of {RANKS} ranks: the mean is the same.")
    print(f"   What arrives when the division by {RANKS} is done")
    found = run_ranks(half_gradient, RANKS)[0]
    for name, (large, small) in found.items():
        print(f"      {name:36} {large:9,.0f}  {small:.2e}   {verdict(large, small)}")
    assert [verdict(*values) for values in found.values()] == ["lost", "overflow", "right"]
    print()


def verdict(large: float, small: float) -> str:
    if large == float("inf"):
        return "overflow"
    return "right" if (large, small) == (LARGE, SMALL) else "lost"


def passes_over_memory() -> None:
    print("4. What a division costs in passes over the gradients (copying into the bucket is one already)")
    gradients, bucket = torch.randn(1 << 23), torch.empty(1 << 23)

    def separately() -> None:
        bucket.copy_(gradients)
        bucket.div_(RANKS)

    def while_copying() -> None:
        torch.mul(gradients, 1 / RANKS, out=bucket)

    def median(step) -> float:
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return sorted(times)[7] * 1e3

    separately()
    apart = bucket.clone()
    while_copying()
    assert torch.equal(apart, bucket)
    print(f"   copy, then divide: 2 passes, {median(separately):6.1f} ms for 32 MiB")
    print(f"   copy and divide:   1 pass,   {median(while_copying):6.1f} ms (so does minddp's reducer)")
    print("   in the collective: no pass of its own (AVG, where the engine has it, as NCCL)\n")


# %% [markdown]
# ## Batch size and learning rate
#
# M ranks with n rows each are one process with M n rows. So a learning rate that was right for n rows has to be
# chosen anew.

# %%


def sgd(rank: int, world_size: int, rate: float, steps: int, rows: int) -> Tensor:
    """The weights after ``steps`` steps with ``rows`` rows on each rank, cycling through the batch."""
    net = minddp.DistributedDataParallel(make_model())
    x, target = make_batch()
    for step in range(steps):
        begin = (step * world_size + rank) * rows % ROWS
        net.zero_grad()
        F.mse_loss(net(x[begin : begin + rows]), target[begin : begin + rows]).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= rate * parameter.grad
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def sgd_alone(rate: float, steps: int, rows: int) -> Tensor:
    model, (x, target) = make_model(), make_batch()
    for step in range(steps):
        begin = step * rows % ROWS
        model.zero_grad()
        F.mse_loss(model(x[begin : begin + rows]), target[begin : begin + rows]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def equivalence() -> None:
    print("5. What keeps training equivalent")
    together, alone = run_ranks(sgd, RANKS, 0.01, 8, 4)[0], sgd_alone(0.01, 8, 16)
    difference = (together - alone).abs().max().item()
    print(f"   {RANKS} ranks x 4 rows beside one process x 16, 8 steps: the same weights, to {difference:.0e}")
    assert difference < 1e-5

    print(f"   1 step with {RANKS} times the rows, at {RANKS} times the rate, beside {RANKS} small steps:")
    gaps = []
    for rate in (0.002, 0.001, 0.0005):
        small, large = sgd_alone(rate, RANKS, 4), run_ranks(sgd, RANKS, RANKS * rate, 1, 4)[0]
        gaps.append((small - large).norm().item())
        print(f"      rate {rate:<7} distance of the weights {gaps[-1]:.2e}")
    assert all(3.3 < gaps[i] / gaps[i + 1] < 4.7 for i in range(2))
    print("   Half the rate, a quarter of the distance: scaling the rate is right to first order only.")


# %% [markdown]
# ## How large a batch still pays
#
# More rows make the gradient less noisy, and at some point that is no use. McCandlish et al., "An Empirical Model
# of Large-Batch Training" (2018), put this point at the noise scale: the variance of one row's gradient, over the
# squared norm of the gradient of all data. Far smaller batches waste no row, far larger ones waste most of theirs.
#
# Two norms are enough to estimate it (appendix A.1): that of a rank's own gradient, of n rows, and that of the ranks'
# average, of M n rows. A communication hook sees each bucket before it is averaged. Both norms are noisy, so they are
# averaged over some steps before they are divided.

# %%


def noise_scale(rank: int, world_size: int, rows: int, steps: int) -> tuple[float, float]:
    """The noise scale, in rows, estimated beside training; and the exact one, from the gradient of each row."""
    net, (x, target) = minddp.DistributedDataParallel(make_model()), make_batch()
    norms = torch.zeros(2)  # squared, of the ranks' own gradients and of their average

    def before_the_average(_, bucket):
        norms[0] += bucket.buffer().square().sum()
        return allreduce_hook(None, bucket)

    net.register_comm_hook(None, before_the_average)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        drawn = torch.randint(ROWS, (rows,), generator=generator)
        net.zero_grad()
        F.mse_loss(net(x[drawn]), target[drawn]).backward()
        norms[1] += gradient(net).square().sum()
    dist.all_reduce(norms)
    small, large = (norms / world_size / steps).tolist()
    square = (world_size * large - small) / (world_size - 1)
    variance = rows * (small - large) / (1 - 1 / world_size)
    return variance / square, exact_noise_scale(x, target)


def exact_noise_scale(x: Tensor, target: Tensor) -> float:
    def of(row: slice) -> Tensor:
        model = make_model()
        F.mse_loss(model(x[row]), target[row]).backward()
        return gradient(model)

    mean = of(slice(None))
    deviations = [(of(slice(row, row + 1)) - mean).square().sum() for row in range(ROWS)]
    return (sum(deviations) / ROWS / mean.square().sum()).item()


def how_large_a_batch() -> None:
    print("\n6. How large a batch still pays")
    estimated, exact = run_ranks(noise_scale, RANKS, 4, 200)[0]
    print(f"   noise scale, estimated from {RANKS} ranks x 4 rows: {estimated:.1f} rows, exactly: {exact:.1f}")
    assert abs(estimated / exact - 1) < 0.2


# %% [markdown]
# ## Unequal numbers of micro-batches
#
# Packed sequences, images and rollouts give ranks different numbers of micro-batches in a step. Nothing has to be
# padded, and no number has to be agreed on. Each rank runs its own forwards and backwards under `no_sync()`, and the
# last one outside. The ranks communicate in that one alone. `reduction="weighted"` divides by the rows of all ranks.
#
# A rank that has no batch at all in a step runs an empty one, with the weight 0. It sends zeros, and steps as the
# others do.

# %%

COUNTS = ((3, 5, 1), (1, 2, 4), (2, 0, 6))  # micro-batches of three ranks, in each step


def micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Each has 1 to 7 rows."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    rows = [int(torch.randint(1, 8, (1,), generator=draw)) for _ in range(COUNTS[step][rank])]
    drawn = [torch.randn(count, 6, generator=draw) for count in rows]
    return [(x, x.exp().sum(1, keepdim=True)) for x in drawn]


def train_unevenly(rank: int, world_size: int) -> list[Tensor]:
    """This rank's gradients in each step."""
    net, found = minddp.DistributedDataParallel(make_model(), reduction="weighted"), []
    for step in range(len(COUNTS)):
        net.zero_grad()
        *local, last = micro_batches(step, rank) or [(torch.empty(0, 6), torch.empty(0, 1))]
        with net.no_sync():
            for x, target in local:
                minddp.add_weight(net, len(x))
                F.mse_loss(net(x), target, reduction="sum").backward()
        x, target = last
        minddp.add_weight(net, len(x))
        F.mse_loss(net(x), target, reduction="sum").backward()  # here the ranks communicate, once
        found.append(gradient(net))
    return found


def unequal_numbers() -> None:
    print("\n7. Unequal numbers of micro-batches")
    ranks = run_ranks(train_unevenly, 3)
    for step, counts in enumerate(COUNTS):
        whole = [pair for rank in range(3) for pair in micro_batches(step, rank)]
        x, target = (torch.cat(parts) for parts in zip(*whole, strict=True))
        model = make_model()
        F.mse_loss(model(x), target).backward()
        assert all(torch.equal(rank[step], ranks[0][step]) for rank in ranks)
        assert equal_up_to_rounding(ranks[0][step], gradient(model))
        print(f"   step {step}, {counts} micro-batches: the gradient of one process with all {len(x)} rows")


if __name__ == "__main__":
    uneven_shares(mean_and_sum())
    where_to_divide()
    passes_over_memory()
    equivalence()
    how_large_a_batch()
    unequal_numbers()
