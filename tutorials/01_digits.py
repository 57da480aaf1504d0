"""01. Handwritten digits, data-parallel: train, compare with one process, stop, resume.

    torchrun --nproc-per-node 2 tutorials/01_digits.py              (make demo)
    torchrun --nproc-per-node 2 tutorials/01_digits.py --torch-ddp  (make demo TORCH_DDP=1)

Every rank runs this file. Each has the whole model and its own part of the data; what makes it one training
run and not several is the one line in `wrap`. The page shows, on 1,797 real 8 x 8 digits, that

  * the net learns: at least 0.97 of the held-out digits are named right;
  * the averaged gradient is the gradient of one process that holds the whole batch;
  * the ranks' weights end bit-identical, although no weight is ever sent after the start;
  * a run that resumes from rank 0's checkpoint ends at the same bits as the run that never stopped.

The digits lie beside this file (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998; CC BY 4.0).

The last line is a digest of the weights: with `--torch-ddp` PyTorch's class must arrive at the same one.
"""

import argparse
import copy
import hashlib
import os
from pathlib import Path

import _clone  # noqa: F401 (finds minddp in this clone)
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import minddp

HELD_OUT = 357  # of 1,797; the other 1,440 divide evenly by 2, 3 or 4 ranks' batches of 30
BATCH = 30  # per rank
LEARNING_RATE = 4e-3  # at the start; falls linearly to 0
GOAL = 0.97

# %% [markdown]
# ## The net

# %%


class DigitNet(nn.Module):
    """Two convolutions and two linear layers: some 56,000 parameters, so one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 96)
        self.out = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))

# %% [markdown]
# ## The line that makes it data-parallel
#
# Everything else on this page is what a training script has anyway. Both classes take the same line.

# %%


def wrap(model: nn.Module, torch_ddp: bool) -> nn.Module:
    """The line that makes training data-parallel: the same for both classes."""
    return nn.parallel.DistributedDataParallel(model) if torch_ddp else minddp.DistributedDataParallel(model)

# %% [markdown]
# ## The data
#
# Each rank loads all of it, and trains on its own part. The order is drawn with a fixed seed, so all ranks agree on
# what is held out.

# %%


def digits() -> tuple[TensorDataset, TensorDataset]:
    """(training set, held-out set), the same on every rank."""
    numbers = torch.from_numpy(np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=","))
    images = numbers[:, :64].float().view(-1, 1, 8, 8) / 16
    labels = numbers[:, 64].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_out], labels[held_out])


def digest(model: nn.Module) -> str:
    """The first 16 hex digits of the SHA-256 of all weights' bytes."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]

# %% [markdown]
# ## A training run
#
# Both classes are used in the same way, so the run takes either.

# %%


class Run:
    """One training run: a net, its wrapper, an optimizer, and a loader over this rank's part."""

    def __init__(self, training: TensorDataset, torch_ddp: bool, epochs: int, seed: int, resume: Path | None = None):
        torch.manual_seed(seed)
        model = DigitNet()
        # Every rank loads rank 0's file. (Where only rank 0 has it, loading the model there is enough, since
        # the wrapper broadcasts it; the optimizer's state would have to be sent by hand. See 03.)
        saved = torch.load(resume, weights_only=True) if resume else None
        if saved:
            model.load_state_dict(saved["model"])
        self.ddp = wrap(model, torch_ddp)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=LEARNING_RATE)
        self.epoch, self.epochs = 0, epochs
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]
        self.sampler = DistributedSampler(training, seed=0, drop_last=True)
        self.loader = DataLoader(training, BATCH, sampler=self.sampler)

    def save(self, path: Path) -> None:
        """Rank 0 writes, under another name first: a run killed here leaves no half file."""
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": self.ddp.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": self.epoch,
            }
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        dist.barrier()

    def train_epoch(self, advance=lambda: None) -> float:
        """One pass over the data; the mean loss over all ranks.

        Each rank's loss is its own; only the gradients are averaged, inside backward. For the number that
        is printed the losses have to be averaged by hand.
        """
        self.sampler.set_epoch(self.epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - self.epoch / self.epochs)
        total = torch.zeros(())
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.ddp(images), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
            advance()
        self.epoch += 1
        dist.all_reduce(total)
        return total.item() / (len(self.loader) * dist.get_world_size())

    @torch.no_grad()
    def accuracy(self, held_out: TensorDataset) -> float:
        """Share of the held-out digits that are named right; each rank looks at its part of them."""
        images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in held_out.tensors)
        right = (self.ddp.module(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        return right.item() / len(held_out)

# %% [markdown]
# ## What is checked
#
# One process with the whole batch is the truth. The ranks together must find its gradient.

# %%


def gradient_difference(run: Run, training: TensorDataset) -> tuple[float, float]:
    """(largest difference, largest gradient): the ranks' averaged gradients beside one process's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (part[: BATCH * world_size] for part in training.tensors)
    alone = copy.deepcopy(run.ddp.module)
    F.cross_entropy(alone(images), labels).backward()
    F.cross_entropy(run.ddp(images.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
    pairs = list(zip(run.ddp.module.parameters(), alone.parameters(), strict=True))
    return (
        max((ours.grad - truth.grad).abs().max().item() for ours, truth in pairs),
        max(truth.grad.abs().max().item() for _, truth in pairs),
    )


def train(run: Run, held_out: TensorDataset, console: Console, folder: Path) -> float:
    """Trains to the last epoch, with a checkpoint half way and at the end; the held-out accuracy."""
    accuracy = run.accuracy(held_out)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("training", total=(run.epochs - run.epoch) * len(run.loader))
        while run.epoch < run.epochs:
            loss = run.train_epoch(lambda: progress.advance(bar))
            accuracy = run.accuracy(held_out)
            console.print(f"epoch {run.epoch:2d}   loss {loss:.4f}   held-out accuracy {accuracy:.4f}")
            if run.epoch in (run.epochs // 2, run.epochs):
                run.save(folder / f"digits-{run.epoch}.pt")
    return accuracy


def everyone(text: str) -> list[str]:
    """Every rank's text, on every rank."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts

# %% [markdown]
# ## All of it

# %%


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a net on handwritten digits, data-parallel.")
    parser.add_argument("--torch-ddp", action="store_true", help="use PyTorch's DistributedDataParallel")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "output", help="for checkpoints")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 tutorials/01_digits.py")
    if arguments.epochs < 2:
        parser.error("--epochs: at least 2, for a checkpoint half way")

    dist.init_process_group("gloo")
    try:
        demonstrate(arguments)
    finally:
        dist.destroy_process_group()


def demonstrate(arguments: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    training, held_out = digits()

    # Another seed on each rank: the wrapper's constructor sends rank 0's weights to all.
    run = Run(training, arguments.torch_ddp, arguments.epochs, seed=rank, resume=arguments.resume)
    count = sum(parameter.numel() for parameter in run.ddp.parameters())
    name = "PyTorch's" if arguments.torch_ddp else "minddp's"
    console.print(f"{name} DistributedDataParallel: {world_size} ranks, {count:,} parameters, {BATCH} images each")

    difference, size = gradient_difference(run, training)
    console.print(
        f"averaged gradients beside one process with the whole batch of {BATCH * world_size}: "
        f"largest difference {difference:.1e} (gradients up to {size:.2f})"
    )
    assert difference <= 1e-6 * max(1, size), "the averaged gradients are not the whole batch's"

    accuracy = train(run, held_out, console, arguments.folder)
    digests = everyone(digest(run.ddp.module))
    assert len(set(digests)) == 1, f"the ranks' weights differ: {digests}"
    console.print(f"weights bit-identical on all {world_size} ranks: {' = '.join(digests)}")

    half = arguments.epochs // 2
    if run.epoch > half and arguments.resume is None:
        console.print(f"a second run, from rank 0's checkpoint after epoch {half}:")
        checkpoint = arguments.folder / f"digits-{half}.pt"
        again = Run(training, arguments.torch_ddp, arguments.epochs, seed=100 + rank, resume=checkpoint)
        # Both classes cut their buckets anew after the first backward. On three ranks and more, the order in which
        # a gradient's parts are added depends on its place in the bucket. So this run has its first backward here,
        # as the other had, and its first step uses the buckets that the other's used.
        gradient_difference(again, training)
        train(again, held_out, console, arguments.folder)
        assert everyone(digest(again.ddp.module)) == digests, "the resumed run ended elsewhere"
        console.print("the resumed run ended at the same bits")

    assert accuracy >= GOAL, f"held-out accuracy {accuracy:.4f} is under {GOAL}"
    console.print(f"held-out accuracy {accuracy:.4f} (at least {GOAL})")
    console.print(f"digest of the final weights: {digests[0]}")


if __name__ == "__main__":
    main()
