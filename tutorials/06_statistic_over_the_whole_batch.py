"""A statistic over the whole batch, inside the graph: the minibatch standard deviation layer on two ranks.

The layer appends one channel to ``(B, C, H, W)`` features: the standard deviation over the batch of each
position, averaged over the positions. With the batch spread over ranks, each rank sees a part of it. What
can carry the statistic across, value *and* gradient?

    python tutorials/06_statistic_over_the_whole_batch.py
"""

import os
import textwrap

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from losses import MinibatchStdDev
from ranks import run_ranks
from torch import nn

from minddp import DistributedDataParallel
from minddp import functional as F

BATCH, RANKS = 4, 2


def say(text):
    print(textwrap.fill(" ".join(text.split()), 100), end="\n\n")

# %% [markdown]
# ## Ways to carry a statistic over ranks
#
# The value is easy to carry over. The gradient is not: a rank's features have a share in every rank's statistic, so
# what comes back to them must come from all ranks.

# %%


def features():
    return torch.randn(BATCH, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def deviation(mean_over_batch):
    """The layer's number, for a given way to take the mean over the batch."""

    def of(x):
        mean = mean_over_batch(x)
        return (mean_over_batch((x - mean) ** 2) + 1e-8).sqrt().mean()

    return of


def local_mean(x):
    return x.mean(0)


def mean_by_plain_all_reduce(x):
    """The value crosses the ranks, the gradient does not: autograd sees a copy of the local mean."""
    mean = x.mean(0)
    with torch.no_grad():
        dist.all_reduce(mean.data)
    return mean / RANKS


def mean_by_functional(x):
    return F.all_reduce(x.mean(0), "avg")


WAYS = {
    "each rank its own": local_mean,
    "torch.distributed.all_reduce": mean_by_plain_all_reduce,
    "minddp.functional.all_reduce": mean_by_functional,
}


def statistic_and_gradient(rank, size):
    """This rank's number and gradient, for each way. Its loss is number * (rank + 1)."""
    results = {}
    for name, way in WAYS.items():
        x = features().chunk(size)[rank].clone().requires_grad_()
        number = deviation(way)(x)
        (number * (rank + 1)).backward()
        results[name] = number.item(), x.grad
    return results


def one_process():
    """The truth: all ranks' losses over the whole batch."""
    x = features().requires_grad_()
    number = deviation(local_mean)(x)
    sum(number * (rank + 1) for rank in range(RANKS)).backward()
    return number.item(), x.grad


def compare_the_ways():
    truth, gradient = one_process()
    say(
        f"""One process with all {BATCH} samples finds a statistic of {truth:.6f}. On {RANKS} ranks, with {
            BATCH // RANKS
        } samples each, and the gradients compared with the whole batch's:"""
    )
    ranks = run_ranks(statistic_and_gradient, RANKS)
    for name in WAYS:
        numbers = [result[name][0] for result in ranks]
        error = (torch.cat([result[name][1] for result in ranks]) - gradient).abs().max().item()
        print(f"  {name:30} {numbers[0]:.6f} {numbers[1]:.6f}   largest gradient error {error:.1e}")
        value_is_right = all(abs(number - truth) < 1e-12 for number in numbers)
        assert value_is_right == (name != "each rank its own")
        assert (error < 1e-12) == (name == "minddp.functional.all_reduce")
    print()
    say("""The plain all_reduce is the treacherous one: its value is right. Its gradient lacks what this
        rank's samples do to the other rank's loss.""")

# %% [markdown]
# ## Under DistributedDataParallel
#
# DistributedDataParallel averages the gradients of weights. A collective in the model adds the gradients of
# features. Both together must be the gradient of one process with the whole batch.

# %%


class Discriminator(nn.Module):
    def __init__(self, statistic):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh())
        self.statistic = statistic
        self.head = nn.Conv2d(4, 1, 3)
        self.double()

    def forward(self, x):
        return self.head(self.statistic(self.body(x)))


class StdDevInOneProcess(nn.Module):
    def forward(self, x):
        return torch.cat([x, deviation(local_mean)(x).expand(len(x), 1, 3, 3)], dim=1)


def under_ddp(rank, size, per_rank, own_group):
    group = dist.new_group() if own_group else None
    ddp = DistributedDataParallel(Discriminator(MinibatchStdDev(group)))
    x = features()[: size * per_rank]
    output = ddp(x.chunk(size)[rank])
    output.square().mean().backward()
    return output.detach(), {name: p.grad for name, p in ddp.module.named_parameters()}


def compare_under_ddp():
    say("""As a layer in a model under DistributedDataParallel, which averages the parameters' gradients
        with collectives of its own, during the same backward. Outputs and every parameter's gradient,
        beside one process:""")
    for per_rank in (2, 1):
        reference = Discriminator(StdDevInOneProcess())
        expected = reference(features()[: RANKS * per_rank])
        expected.square().mean().backward()
        for own_group in (False, True):
            ranks = run_ranks(under_ddp, RANKS, per_rank, own_group)
            output = (torch.cat([rank[0] for rank in ranks]) - expected).abs().max().item()
            gradient = max(
                (rank[1][name] - p.grad).abs().max().item()
                for rank in ranks
                for name, p in reference.named_parameters()
            )
            where = "a group of its own" if own_group else "DDP's group"
            print(f"  {per_rank} per rank, on {where:18}  output {output:.1e}, gradients {gradient:.1e}")
            assert output < 1e-12
            assert gradient < 1e-12
    print()
    say("""One sample per rank works, where a local deviation would be 0. Both groups work as long as all
        ranks issue their collectives in the same order: with one model on all ranks they do.""")

# %% [markdown]
# ## A buffer is no answer
#
# Buffers are copied from rank 0. They are not averaged, and no gradient flows through them.

# %%


class StatisticInABuffer(nn.Module):
    """The hope: register the statistic as a buffer, and DDP will synchronize it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        carried = self.mean.clone()
        self.mean.fill_(x.mean().item())
        return carried * self.weight


def carried_by_a_buffer(rank, size):
    ddp = DistributedDataParallel(StatisticInABuffer())
    ddp(torch.tensor([10.0 * (rank + 1)]))
    return ddp(torch.zeros(1)).item()


def a_buffer_is_no_answer():
    values = run_ranks(carried_by_a_buffer, RANKS)
    assert values == [10.0, 10.0]
    say(f"""A registered buffer is not the answer. The ranks' means are 10 and 20; in the next forward
        both find {values[0]:g} in it: DDP broadcasts rank 0's buffer. It averages nothing, and a buffer
        has no gradient.""")

# %% [markdown]
# ## What a wrong order does
#
# A collective in the model is one more call that all ranks must make in the same order. Here they do not. Each rank
# gets an error, where it would have waited.

# %%


def in_another_order(rank, size):
    x = F.all_reduce(torch.ones(2))
    first, second = (F.all_reduce, F.all_gather) if rank == 0 else (F.all_gather, F.all_reduce)
    try:
        first(x)
        second(x)
    except F.CollectiveError as error:
        return str(error)
    return "nothing was noticed"


def what_a_wrong_order_does():
    say("""And if the order differs? Every rank's call is announced before it runs, so both ranks get the
        same error instead of a hang:""")
    texts = run_ranks(in_another_order, RANKS)
    assert texts[0] == texts[1]
    assert "which collective comes now" in texts[0]
    print(textwrap.indent(texts[0], "  | "), end="\n\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compare_the_ways()
    compare_under_ddp()
    a_buffer_is_no_answer()
    what_a_wrong_order_does()
