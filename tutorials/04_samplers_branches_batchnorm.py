"""04. Three ways to train on something else than you think: order, skipped branches, batch norm.

    python tutorials/04_samplers_branches_batchnorm.py

Averaging gradients makes M ranks one training run only if the rest is in order as well:

  * DistributedSampler deals the data out. Without set_epoch(epoch) it deals the same hand in every epoch.
  * A branch that some ranks skip leaves parameters without a gradient there, for which all others would wait.
  * BatchNorm normalizes by what its own rank sees. If the ranks see different things it hides exactly that.
"""

import math
from itertools import chain

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import minddp
from minddp.functional.sync_batchnorm import convert_sync_batchnorm

# %% [markdown]
# ## 1. The sampler
#
# DistributedSampler shuffles with a seed made of `seed` and the epoch's number. It learns that number from
# `set_epoch` only.

# %%


def samplers() -> None:
    print("1. DistributedSampler: ten samples on two ranks")

    def deal(epoch: int | None, ranks: int = 2, **options: bool) -> list[list[int]]:
        hands = []
        for rank in range(ranks):
            sampler = DistributedSampler(range(10), ranks, rank, **options)
            if epoch is not None:
                sampler.set_epoch(epoch)
            hands.append(list(sampler))
        return hands

    for epoch in range(3):
        print(f"   epoch {epoch}   without set_epoch {deal(None)}   with {deal(epoch)}")
        assert sorted(chain(*deal(epoch))) == list(range(10)), "each sample goes to one rank"
    assert deal(0) == deal(None)
    assert deal(0) != deal(1) != deal(2)
    padded, dropped = deal(0, ranks=3), deal(0, ranks=3, drop_last=True)
    print(f"   on three ranks: {padded}: 12 places, so two samples are used twice")
    print(f"   with drop_last: {dropped}: 9 places, so one is left out\n")
    assert (len([*chain(*padded)]), len({*chain(*padded)})) == (12, 10)
    assert len([*chain(*dropped)]) == len({*chain(*dropped)}) == 9


# %% [markdown]
# ## 2. Branches that ranks skip
#
# If one rank leaves a branch out, the others wait for a gradient that never comes, or go on without the average.
# `find_unused_parameters=True` allows it: a rank that did not use a parameter counts as zero, and a parameter that
# nobody used keeps its `.grad`.

# %%


class Branches(nn.Module):
    """``branch`` is for some inputs only; ``never`` is for none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.never = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for layer in (self.trunk, self.branch, self.never):
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor, take_branch: bool) -> Tensor:
        x = self.trunk(x)
        return self.branch(x) if take_branch else x


def step_with_skipped_branch(rank: int, world_size: int, find_unused: bool) -> dict | str:
    """Rank 0 takes the branch, rank 1 does not. The gradients; or what is raised instead."""
    net = minddp.DistributedDataParallel(Branches(), find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.tensor([[2.0 + 2 * rank]]), take_branch=rank == 0).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return {name: None if p.grad is None else p.grad.item() for name, p in net.module.named_parameters()}


def branches() -> None:
    print("2. A branch that rank 1 skips, and one that nobody takes (inputs 2 and 4)")
    found = run_ranks(step_with_skipped_branch, 2, True)
    print(f"   find_unused_parameters=True   both ranks: {found[0]}")
    # trunk: (2 + 4) / 2. branch: (2 + nothing) / 2, an average over all ranks, not over those that took it.
    # never: stays None, so that an optimizer with momentum or weight decay leaves it alone.
    assert found[0] == found[1] == {"trunk.weight": 3.0, "branch.weight": 1.0, "never.weight": None}

    refused = run_ranks(step_with_skipped_branch, 2, False)
    print("   without it, optimizer.step() is refused before it can use what was not averaged:")
    for rank, message in enumerate(refused):
        print(f"      rank {rank}: {message.strip().splitlines()[-1]}")
    assert all("never.weight" in message for message in refused)
    assert "branch.weight" in refused[1]
    print()


# %% [markdown]
# ## 3. Cats, dogs and cars
#
# Each rank sees one kind of photograph only. BatchNorm subtracts the mean of what its own rank sees, and with it
# what tells the kinds apart. SyncBatchNorm takes the mean over all ranks.

# %%

KINDS = ("cats", "dogs", "cars")
FEATURES = 8


def photographs(kind: int, count: int) -> Tensor:
    """Features of one kind of picture: noise around the kind's own brightness (-2, 0 or 2)."""
    return torch.randn(count, FEATURES) + 2.0 * (kind - 1)


def one_kind_each(rank: int, world_size: int, synchronized: bool) -> dict:
    """Each rank's data is of one kind only. Feature means after the norm, and the loss after training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, len(KINDS)))
    if synchronized:
        model = convert_sync_batchnorm(model)
    net = minddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(1 + rank)
    with torch.no_grad():
        mean = model[0](photographs(rank, 64)).mean().item()
    target = torch.full((64,), rank)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(photographs(rank, 64)), target)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach_())
    return {"mean": mean, "loss": loss.item() / world_size}


def torch_on_cpu(rank: int, world_size: int) -> str:
    try:
        nn.SyncBatchNorm(FEATURES)(photographs(rank, 4))
    except ValueError as error:
        return str(error)
    return "nothing"


def batch_norm() -> None:
    print("3. Rank 0 sees only cats, rank 1 dogs, rank 2 cars")
    outcome = {}
    for name, synchronized in (("BatchNorm", False), ("SyncBatchNorm", True)):
        results = run_ranks(one_kind_each, 3, synchronized)
        means = ", ".join(f"{kind} {result['mean']:+.2f}" for kind, result in zip(KINDS, results, strict=True))
        print(f"   {name:14} brightness after the norm: {means};   loss after 40 steps {results[0]['loss']:.3f}")
        outcome[name] = results
    print(f"   BatchNorm on one kind subtracts what sets the kind apart: no better than guessing, "
          f"ln 3 = {math.log(3):.3f}")  # fmt: skip
    assert all(abs(result["mean"]) < 1e-3 for result in outcome["BatchNorm"])
    assert outcome["SyncBatchNorm"][0]["mean"] < -0.5 < 0.5 < outcome["SyncBatchNorm"][2]["mean"]
    assert abs(outcome["BatchNorm"][0]["loss"] - math.log(3)) < 0.1
    assert outcome["SyncBatchNorm"][0]["loss"] < 0.3
    message = run_ranks(torch_on_cpu, 3)[0]
    print(f"   (torch.nn.SyncBatchNorm on CPU: {message!r})")
    assert "GPU" in message


if __name__ == "__main__":
    samplers()
    branches()
    batch_norm()
