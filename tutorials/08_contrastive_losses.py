"""Contrastive losses under DDP: SimCLR, CLIP and Barlow Twins on two ranks, equal to one process.

A contrastive loss compares a sample with the whole batch, so a rank needs the others' features, and the
others' losses need its features: gradients must cross ranks as well. ``losses.py`` has the losses.

    python tutorials/08_contrastive_losses.py
"""

import textwrap

import _clone  # noqa: F401 (finds minddp in this clone)
import losses
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from minddp import DistributedDataParallel

BATCH, RANKS, STEPS = 32, 2, 25


def say(text):
    print(textwrap.fill(" ".join(text.split()), 100), end="\n\n")

# %% [markdown]
# ## The encoder and the losses
#
# A contrastive loss compares each sample with all others of the batch. On several ranks that means: with those of
# the other ranks, too.

# %%


class Encoder(nn.Module):
    """Two views in, two embeddings and a temperature out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, first, second):
        return self.body(first), self.body(second), self.log_scale.exp()


def views(step):
    """The whole batch of a step: samples from eight clusters, each seen twice with noise."""
    generator = torch.Generator().manual_seed(step)
    centers = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    samples = centers[torch.randint(8, (BATCH,), generator=generator)]
    noise = torch.randn(2, BATCH, 16, dtype=torch.float64, generator=generator)
    return samples + 0.3 * noise


def clip_with_a_plain_all_gather(image, text, scale):
    """The common mistake: everybody's features arrive as constants."""
    image, text = normalize(image, dim=1), normalize(text, dim=1)

    def gathered(mine):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.detach())
        parts[dist.get_rank()] = mine
        return torch.cat(parts)

    pairs = dist.get_rank() * len(image) + torch.arange(len(image))
    of_images = cross_entropy(scale * image @ gathered(text).T, pairs)
    return (of_images + cross_entropy(scale * text @ gathered(image).T, pairs)) / 2


LOSSES = {
    "SimCLR (NT-Xent)": lambda a, b, scale: losses.nt_xent(a, b),
    "CLIP, local loss": lambda a, b, scale: losses.clip(a, b, scale),
    "CLIP, whole loss on each rank": lambda a, b, scale: losses.clip(a, b, scale, local_loss=False),
    "Barlow Twins": lambda a, b, scale: losses.barlow_twins(a, b),
    "CLIP, plain all_gather": clip_with_a_plain_all_gather,
    "CLIP, negatives of this rank only": lambda a, b, scale: losses.clip(a, b, scale, group=alone()),
}
WRONG = ("CLIP, plain all_gather", "CLIP, negatives of this rank only")
_groups = {}

# %% [markdown]
# ## One process beside two ranks
#
# The same batch, once in one process, once spread over two ranks.

# %%


def alone():
    """A group of this process alone: made once for each default group."""
    world = dist.group.WORLD
    if world not in _groups:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _groups.clear()
        _groups[world] = groups[dist.get_rank()]
    return _groups[world]


def train(rank, size, name):
    """Some steps of SGD under DDP: the first step's loss and gradients, the last weights."""
    ddp = DistributedDataParallel(Encoder(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    first = None
    for step in range(STEPS):
        a, b = (view.chunk(size)[rank] for view in views(step))
        optimizer.zero_grad()
        loss = LOSSES[name](*ddp(a, b))
        loss.backward()
        if first is None:
            first = loss.item(), flat([p.grad for p in ddp.parameters()])
        optimizer.step()
    return *first, flat([p.detach() for p in ddp.parameters()])


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors if tensor is not None])


def compare(name):
    """Two ranks beside one: the same loss run by one process with the whole batch."""
    of_one_process = "CLIP, local loss" if name in WRONG else name
    ((loss, gradient, weights),) = run_ranks(train, 1, of_one_process)
    ranks = run_ranks(train, RANKS, name)
    mean_loss = sum(rank[0] for rank in ranks) / RANKS
    gradient_error = (ranks[0][1] - gradient).norm() / gradient.norm()
    weight_error = (ranks[0][2] - weights).norm() / weights.norm()
    print(f"  {name:34}{loss:10.4f}{mean_loss:12.4f}{gradient_error:16.1e}{weight_error:18.1e}")
    right = abs(mean_loss - loss) < 1e-9 and gradient_error < 1e-9 and weight_error < 1e-9
    assert right == (name not in WRONG)


if __name__ == "__main__":
    say(f"""A batch of {BATCH} pairs; one process holds all, or {RANKS} ranks hold {BATCH // RANKS} each
        under DistributedDataParallel. Compared are the first step's loss (the mean over ranks) and
        gradient, and the weights after {STEPS} steps of SGD:""")
    print(f"  {'':34}{'one process':>12}{'two ranks':>10}{'gradient error':>16}{'error of weights':>18}")
    for name in LOSSES:
        compare(name)
    print()
    say("""The first four are one process' training, to rounding. Each rank returns a loss such that the
        mean of the ranks' losses is the whole batch's; collectives sum the gradients of all ranks'
        losses; DDP averages over ranks. For the same reason CLIP may be computed whole on every rank: N
        equal losses, averaged, are one.""")
    say("""The last two are common mistakes. A plain all_gather gives the right loss and a wrong
        gradient: a rank's features also stand in the other ranks' losses, and that part is lost. With
        negatives of one's own rank only, the loss is another one.""")
