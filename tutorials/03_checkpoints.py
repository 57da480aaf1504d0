"""03. Checkpoints: who saves, who loads, and a killed run that ends where the unbroken one does.

    python tutorials/03_checkpoints.py

All ranks hold the same weights, so one of them saves: rank 0. Loading is the harder half. What must be back
on every rank is the weights and buffers, the optimizer's state, the position in the data and in its shuffling, and
the state of the random generator, which differs between ranks once dropout has been drawn from it.
"""

import os
import signal
import tempfile
from pathlib import Path

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import minddp

EPOCHS, STEPS_PER_EPOCH, BATCH = 3, 6, 4


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))


def make_loader(world_size: int) -> DataLoader:
    x = torch.randn(STEPS_PER_EPOCH * BATCH * world_size, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=7))


def largest_difference(model: nn.Module) -> float:
    """Between any two ranks, over all weights."""
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return max((other - everyone[0]).abs().max().item() for other in everyone)


# %% [markdown]
# ## Save and resume
#
# One rank saves, since all have the same weights. What is not the same everywhere must be gathered first: each
# rank's random generator. The file appears under its own name only when it is whole, and nobody goes on before
# that: without the barrier another rank might read a half file.

# %%


def save(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Rank 0 writes what is the same everywhere, and every rank's generator state."""
    states: list[Tensor | None] = [None] * dist.get_world_size()
    dist.gather_object(torch.get_rng_state(), states if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        checkpoint = {
            "model": net.module.state_dict(),  # of the module: loads into a wrapped or an unwrapped model
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "generators": states,
        }
        # Under another name first: a run killed in the middle of writing leaves the last good file.
        torch.save(checkpoint, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    dist.barrier()


def train(rank: int, world_size: int, path: Path, killed_at: int | None) -> dict:
    """Trains EPOCHS epochs, from the checkpoint where there is one. Rank 1 may be killed at a step."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    model = make_model(seed=rank)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    net = minddp.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)  # dropout: other masks on every rank
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["generators"][rank])
    start = checkpoint["epoch"] if checkpoint else 0
    loader = make_loader(world_size)
    steps = start * STEPS_PER_EPOCH
    for epoch in range(start, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, target in loader:
            if rank == 1 and steps == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            F.mse_loss(net(x), target).backward()
            optimizer.step()
            steps += 1
        save(path, net, optimizer, epoch + 1)
    return {"start": start, "model": {name: value.clone() for name, value in model.state_dict().items()}}


def killed_and_resumed(folder: Path) -> None:
    print(f"A run of {EPOCHS} epochs of {STEPS_PER_EPOCH} steps, with a checkpoint after each.")
    unbroken = run_ranks(train, 2, folder / "unbroken.pt", None)[0]
    broken, killed_at = folder / "broken.pt", 2 * STEPS_PER_EPOCH + 3
    try:
        run_ranks(train, 2, broken, killed_at)
    except torch.multiprocessing.ProcessExitedException as error:
        print(f"  the same run, killed at step {killed_at}: rank {error.error_index} died of {error.signal_name}")
    else:
        raise AssertionError("the run was to be killed")
    resumed = run_ranks(train, 2, broken, None)[0]
    assert resumed["start"] == 2
    same = [name for name in unbroken["model"] if torch.equal(unbroken["model"][name], resumed["model"][name])]
    print(f"  started again, it goes on after epoch {resumed['start']} and ends at the same bits: "
          f"{len(same)} of {len(unbroken['model'])} tensors are equal\n")  # fmt: skip
    assert len(same) == len(unbroken["model"])


# %% [markdown]
# ## Who may load
#
# Rank 0 alone may load the weights, if that happens before the model is wrapped: wrapping sends them to all. The
# optimizer's state is sent by nobody. Where only rank 0 has it, the ranks take different steps from equal
# gradients, and drift apart.

# %%


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.ones(4, 8) * (1 + dist.get_rank())
    net.eval()  # no dropout, fixed statistics: only the weights count
    net(x).square().mean().backward()
    optimizer.step()


def make_optimizer(net: nn.Module, state: dict | None) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def ways_to_load(rank: int, world_size: int, path: Path) -> list[float]:
    """The ranks' largest difference in weights, one step after each way of loading."""
    differences = []

    # 1. The file can be read everywhere: every rank loads all of it.
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model = make_model(seed=rank)
    model.load_state_dict(checkpoint["model"])
    net = minddp.DistributedDataParallel(model)
    one_step(net, make_optimizer(net, checkpoint["optimizer"]))
    differences.append(largest_difference(net))

    # 2. Only rank 0 has the file. The constructor's broadcast carries the weights and buffers to the others
    #    (rank 0 must load before wrapping); the optimizer's state is broadcast by hand.
    model = make_model(seed=rank)
    if rank == 0:
        model.load_state_dict(checkpoint["model"])
    net = minddp.DistributedDataParallel(model)
    box = [checkpoint["optimizer"] if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    one_step(net, make_optimizer(net, box[0]))
    differences.append(largest_difference(net))

    # 3. As 2, but the optimizer's state stays on rank 0: Adam takes different steps with equal gradients.
    model = make_model(seed=rank)
    if rank == 0:
        model.load_state_dict(checkpoint["model"])
    net = minddp.DistributedDataParallel(model)
    one_step(net, make_optimizer(net, checkpoint["optimizer"] if rank == 0 else None))
    differences.append(largest_difference(net))

    # 4. Rank 0 loads after wrapping: nothing carries its weights to the others any more.
    net = minddp.DistributedDataParallel(make_model(seed=rank))
    if rank == 0:
        net.module.load_state_dict(checkpoint["model"])
    one_step(net, make_optimizer(net, checkpoint["optimizer"]))
    differences.append(largest_difference(net))
    return differences


def who_loads(path: Path) -> None:
    ways = (
        "every rank loads the file",
        "rank 0 loads, wrapping broadcasts; optimizer state sent",
        "rank 0 loads, wrapping broadcasts; optimizer state not sent",
        "rank 0 loads after wrapping",
    )
    differences = run_ranks(ways_to_load, 2, path)[0]
    print("Who loads, and the largest difference between the ranks' weights one step later:")
    for way, difference in zip(ways, differences, strict=True):
        print(f"  {way:60} {difference:.1e}   {'the same bits' if difference == 0 else 'the ranks drift apart'}")
    assert [difference == 0 for difference in differences] == [True, True, False, False]


# %% [markdown]
# ## Who can read it
#
# Three things go wrong between a file and the ranks that want it.
#
# *When.* A rank that does not wait may find no file, the last one, or half of one. Below the order is forced, so that
# rank 1 looks while rank 0 has written half; in a real run it is a race, lost now and then. `save` above has both
# remedies: the name appears when the file is whole, and a barrier comes before anybody reads.
#
# *Where.* On two machines, rank 0's disk is not rank 1's. `if path.exists()` is true on one of them alone: one goes
# on where it was, the other begins with epoch 0, and they are not even in the same loop any more. Only one rank may
# look; the others receive the answer.
#
# *Onto what.* A tensor that was saved from `cuda:0` is loaded onto `cuda:0`, by every rank. With
# `map_location="cpu"`, as here, it costs no GPU's memory, and `load_state_dict` copies to where the model is;
# `map_location=f"cuda:{local_rank}"` goes there at once.

# %%


def read(path: Path) -> dict | None:
    """What rank 0 finds there, on every rank; ``None`` where it finds nothing."""
    box = [None]
    if dist.get_rank() == 0 and path.exists():
        box = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def when_and_where(rank: int, world_size: int, path: Path) -> list[str]:
    found = []

    def look(file: Path) -> str:
        try:
            return f"epoch {torch.load(file, map_location='cpu', weights_only=True)['epoch']}"
        except (RuntimeError, EOFError, OSError):
            return "half a file"

    whole, slow = path.read_bytes(), path.with_name("slow.pt")
    if rank == 0:
        slow.write_bytes(whole[: len(whole) // 2])
    dist.barrier()  # forces the order that a race may take
    found.append(look(slow))
    dist.barrier()
    if rank == 0:
        slow.write_bytes(whole)
    dist.barrier()
    found.append(look(slow))

    own = path.with_name(f"machine{rank}")
    own.mkdir()
    if rank == 0:
        (own / "model.pt").write_bytes(whole)
    dist.barrier()
    found.append("goes on" if (own / "model.pt").exists() else "begins again")
    checkpoint = read(own / "model.pt")
    found.append("nothing" if checkpoint is None else f"epoch {checkpoint['epoch']}")
    return found


def who_can_read(path: Path) -> None:
    first, second = run_ranks(when_and_where, 2, path)
    ways = (
        "a file that rank 0 is still writing",
        "the same, once it is whole",
        "each machine has a folder; each rank looks in its own",
        "each machine has a folder; rank 0 looks and tells",
    )
    print("\nWhat ranks 0 and 1 find:")
    for way, mine, other in zip(ways, first, second, strict=True):
        print(f"  {way:60} {mine:12} {other}")
    assert second[0] == "half a file" and first[1] == second[1] == first[3] == second[3] == f"epoch {EPOCHS}"
    assert first[2] != second[2]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        killed_and_resumed(Path(name))
        who_loads(Path(name) / "unbroken.pt")
        who_can_read(Path(name) / "unbroken.pt")


if __name__ == "__main__":
    main()
