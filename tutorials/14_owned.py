"""14. Muon without computing each matrix twice: parameters that have owners.

    python tutorials/14_owned.py

Under DDP every rank holds the same gradients, and every rank takes the same optimizer step. For AdamW that costs
memory: each rank keeps two numbers for each parameter, the same ones. For Muon it costs time, too: each rank
orthogonalizes each matrix, and comes to the same result.

With `minddp.Owned` each parameter has one owner. The owner alone steps it, with the state that it alone keeps, and
sends the new values to the others. When `step()` returns, all parameters are whole on all ranks. Nothing else in the
program changes: gradients are averaged as before, so clipping, schedulers and evaluation see what they saw before.

The page trains the small GPT of tutorial 10 both ways, with Muon on the matrices and AdamW on the rest. It shows that

  * the losses are the same numbers at each step, and the weights the same bits at the end;
  * the optimizers' state is divided: together the ranks keep what one rank kept before;
  * a checkpoint is the plain optimizers', and either way goes on from the other's.
"""

import copy
import importlib

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import minddp

gpt = importlib.import_module("10_nanogpt")

STEPS = 20


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Muon is for the matrices between layers; embeddings, norms and biases are AdamW's."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def plain(ddp: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(ddp.module)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]


def owned(ddp: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(ddp.module)
    muon, adamw = (matrices, torch.optim.Muon, {"lr": 0.02}), (others, torch.optim.AdamW, {"lr": 3e-3})
    return [minddp.Owned(ddp, [muon, adamw])]


def train(ddp: nn.Module, optimizers: list[torch.optim.Optimizer], text: Tensor, seed: int) -> list[float]:
    """The mean loss over ranks of each step; the same loop for both."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.zeros(STEPS)
    for step in range(STEPS):
        loss = ddp(*gpt.draw(text, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def kept(optimizers: list[torch.optim.Optimizer]) -> int:
    """How many numbers the optimizers' state has on this rank."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(gpt.GPT())


def both_ways(rank: int, world_size: int) -> dict[str, object]:
    text = gpt.read_corpus()[0]
    one, two = wrapped(), wrapped()
    by_all, by_owners = plain(one), owned(two)
    losses = train(one, by_all, text, rank), train(two, by_owners, text, rank)
    numbers = kept(by_all), kept(by_owners)

    # A checkpoint, as a trainer saves it: gathered on rank 0, which alone calls state_dict().
    (owner,) = by_owners
    owner.consolidate_state_dict(to=0)
    saved = [owner.state_dict()["optimizers"] if rank == 0 else None]
    dist.broadcast_object_list(saved)

    # The plain optimizers go on from it, and the owners from the plain optimizers' own state.
    three, four = wrapped(), wrapped()
    for ddp in (three, four):
        ddp.load_state_dict(one.state_dict())
    swapped = plain(three), owned(four)
    for optimizer, state in zip(swapped[0], saved[0]):
        optimizer.load_state_dict(state)
    swapped[1][0].load_state_dict(copy.deepcopy({"optimizers": [optimizer.state_dict() for optimizer in by_all]}))
    after = [train(ddp, optimizers, text, rank) for ddp, optimizers in zip((one, three, four), (by_all, *swapped))]
    same = all(torch.equal(p, q) for p, q in zip(one.parameters(), four.parameters()))
    return {"losses": losses, "numbers": numbers, "after": after, "same weights": same}


def main() -> None:
    ranks = run_ranks(both_ways, 2)
    alone, owners = ranks[0]["losses"]
    print(f"{STEPS} steps, every rank steps all:          loss {alone[0]:.3f}, at last loss {alone[-1]:.3f}")
    print(f"{STEPS} steps, each parameter has an owner: loss {owners[0]:.3f}, at last loss {owners[-1]:.3f}")
    assert alone == owners
    before, shares = ranks[0]["numbers"][0], [found["numbers"][1] for found in ranks]
    print(f"numbers of state on each rank: {before} before, {shares[0]} and {shares[1]} with owners")
    assert sum(shares) == before and max(shares) < 0.6 * before
    went_on, from_owners, from_plain = ranks[0]["after"]
    print(f"{STEPS} more steps, without a break and from the other way's checkpoint: the same losses")
    assert went_on == from_owners == from_plain and all(found["same weights"] for found in ranks)


if __name__ == "__main__":
    main()
