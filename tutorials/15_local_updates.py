"""15. Local updates: DiLoCo in 40 lines over no_sync.

    python tutorials/15_local_updates.py

Tutorial 13 sends fewer bytes in each step. The other way is to send in fewer steps: each rank takes many steps on its
own gradients, and then all ranks average how far they have come. DiLoCo (Douillard et al., 2023, arXiv:2311.08105)
does that with two optimizers. The inner one, AdamW, takes the local steps. The outer one, SGD with Nesterov momentum,
takes the averaged way for a gradient.

The page trains the GPT of tutorial 10, made smaller. After 200 ordinary steps each way goes on for 400 more, from the
same weights, with the same batches. It shows that

  * DiLoCo, which sends every 20 steps, ends near the loss of averaging each step, as `wire="int8"` does;
  * the outer momentum earns that: without it, the same averages end between DiLoCo and no communication;
  * DiLoCo sends a twentieth of the bytes, int8 about a quarter, and both together fewer than a sixtieth;
  * after each outer step all ranks have the same weights, bit for bit.
"""

import copy
import importlib
from collections.abc import Callable, Iterator

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import minddp

gpt = importlib.import_module("10_nanogpt")
gpt.WIDTH, gpt.LAYERS, gpt.CONTEXT, gpt.BATCH = 32, 2, 32, 8

BEFORE, STEPS, EVERY = 200, 400, 20

# %% [markdown]
# ## The outer model
#
# Its parameters are the weights that all ranks share. Its loss is the sum of weight times way, whose gradient is the
# way. So a wrapper around it averages the ways of all ranks, as it averages any gradients: in buckets, in one order,
# and in int8 if it is told to.

# %%


class Outer(nn.Module):
    """The weights after the last outer step."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in model.parameters()])

    def forward(self, local: list[nn.Parameter]) -> Tensor:
        return torch.stack([(w * (w - p).detach()).sum() for w, p in zip(self.weights, local, strict=True)]).sum()


# %% [markdown]
# ## The loop
#
# Under `no_sync()` a backward leaves this rank's own gradients in `.grad`, and sends nothing. minddp refuses a step
# with gradients that have bypassed the wrapper, since that is a mistake. It lets a step with gradients of `no_sync()`
# pass, since that is a choice.

# %%


def diloco(ddp: nn.Module, inner: torch.optim.Optimizer, losses: Iterator[Tensor], **options: float | str) -> None:
    """Each of ``losses`` is of a forward of ``ddp``."""
    local = list(ddp.parameters())
    outer = minddp.DistributedDataParallel(Outer(ddp.module), wire=options.pop("wire", None))
    nesterov = torch.optim.SGD(outer.parameters(), **({"lr": 0.7, "momentum": 0.9, "nesterov": True} | options))
    for step in range(1, STEPS + 1):
        with ddp.no_sync():
            next(losses).backward()
        inner.step()
        inner.zero_grad()
        if step % EVERY == 0:
            outer(local).backward()  # now each .grad is the mean way of all ranks
            nesterov.step()
            nesterov.zero_grad()
            with torch.no_grad():
                for mine, shared in zip(local, outer.module.weights, strict=True):
                    mine.copy_(shared)


# %% [markdown]
# ## Beside it
#
# Gradients are averaged in each step, in float32 or in int8; or never. Or the ways are averaged without an outer
# optimizer, which is SGD with a rate of 1: each rank goes on from the mean of the weights.

# %%


def each_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterator[Tensor], steps: int = STEPS) -> None:
    for _ in range(steps):
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(ddp: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterator[Tensor]) -> None:
    with ddp.no_sync():
        each_step(ddp, optimizer, losses)


def means(ddp: nn.Module, inner: torch.optim.Optimizer, losses: Iterator[Tensor]) -> None:
    diloco(ddp, inner, losses, lr=1.0, momentum=0.0, nesterov=False)


def diloco_int8(ddp: nn.Module, inner: torch.optim.Optimizer, losses: Iterator[Tensor]) -> None:
    diloco(ddp, inner, losses, wire="int8")


WAYS: dict[str, tuple[Callable, str | None, int]] = {  # how; the wire of what is averaged; averages
    "no communication": (alone, None, 0),
    "each step, float32": (each_step, None, STEPS),
    'each step, wire="int8"': (each_step, "int8", STEPS),
    f"means every {EVERY} steps": (means, None, STEPS // EVERY),
    f"DiLoCo every {EVERY} steps, float32": (diloco, None, STEPS // EVERY),
    f'DiLoCo every {EVERY} steps, wire="int8"': (diloco_int8, "int8", STEPS // EVERY),
}


def train(rank: int, world_size: int) -> dict[str, tuple[float, float, bool]]:
    """By way: (held-out loss, MB that this rank has put into buckets, are all ranks' weights the same)."""
    training, held_out = gpt.read_corpus()
    fixed, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(rank)
    examples = [gpt.draw(held_out, fixed) for _ in range(40)]
    batches = [gpt.draw(training, own) for _ in range(BEFORE + STEPS)]
    torch.manual_seed(0)
    start = gpt.GPT()
    adamw = torch.optim.AdamW(start.parameters(), lr=2e-3)
    ddp = minddp.DistributedDataParallel(start)
    each_step(ddp, adamw, (ddp(*batch) for batch in batches), BEFORE)
    found = {}
    for name, (way, wire, averages) in WAYS.items():
        ddp = minddp.DistributedDataParallel(copy.deepcopy(start), wire=wire)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
        optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
        way(ddp, optimizer, (ddp(*batch) for batch in batches[BEFORE:]))
        with torch.no_grad():
            loss = torch.stack([ddp.module(*example) for example in examples]).mean()
        weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
        firsts = weights.clone()
        dist.broadcast(firsts, src=0)
        megabytes = averages * sum(ddp.reducer.bucket_nbytes()) / 1e6
        found[name] = (loss.item(), megabytes, torch.equal(weights, firsts))
    return found


if __name__ == "__main__":
    ranks = run_ranks(train, 2)
    print(f"{STEPS} steps on two ranks: loss on text not trained on, and the MB that a rank has put into buckets")
    for name, (loss, megabytes, _) in ranks[0].items():
        print(f"   {name:36} loss {loss:.4f}   {megabytes:6.2f} MB")
        assert all(rank[name][2] for rank in ranks) == (name != "no communication"), name
    print("At the end all ranks' weights are the same, bit for bit; but for those without communication.")
    lone, exact, int8, mean, outer, outer_int8 = (loss for loss, *_ in ranks[0].values())
    assert max(abs(int8 - exact), abs(outer - exact), abs(outer_int8 - exact)) < 0.03
    assert max(outer, outer_int8) + 0.02 < mean < lone
