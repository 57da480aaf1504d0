"""10. A small GPT learns Python, with PyTorch's DistributedDataParallel and, unedited, with minddp's.

    python tutorials/10_nanogpt.py                                                  both runs, then the plot
    torchrun --nproc-per-node 2 tutorials/10_nanogpt.py --losses torch.json         one run, PyTorch's class
    torchrun --nproc-per-node 2 -m minddp.run tutorials/10_nanogpt.py --losses minddp.json   minddp's class
    python tutorials/10_nanogpt.py --plot torch.json minddp.json both.png           two loss curves, one plot

The training part below is an ordinary script in the manner of nanoGPT: it imports PyTorch's class and has
never heard of minddp. What `python -m minddp.run` changes is what that import gives. The corpus is the
standard library of the Python that runs this, so nothing is downloaded; the model knows 97 characters.

The page shows that

  * the model learns: from 4.6 nats a character (all 97 equally likely) to below 2.6;
  * both classes give the same losses at every step; the last line is a digest of the weights.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
CORPUS_CHARACTERS = 2_000_000
CONTEXT, WIDTH, HEADS, LAYERS = 96, 96, 4, 3
BATCH = 8  # sequences per rank and micro-batch
ACCUMULATE = 2  # micro-batches per step; the first is not synchronized
LEARNING_RATE, WARMUP = 3e-3, 20
GOAL = 2.6  # nats per character on text not trained on

OUTPUT = Path(__file__).resolve().parent / "output"


# --- an ordinary training script -------------------------------------------------------------------------


class Block(nn.Module):
    """Attention over what came before, then a two-layer network, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters in, the loss on each next character out; some 350,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.apply(self._initialize)
        self.out.weight = self.characters.weight  # one parameter, used twice

    @staticmethod
    def _initialize(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return F.cross_entropy(self.out(self.norm(self.blocks(x))).flatten(0, 1), following.flatten())


def read_corpus() -> tuple[Tensor, Tensor]:
    """The standard library's modules as indices into ALPHABET, one after another: (training, held out)."""
    texts, left = [], CORPUS_CHARACTERS
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace")[:left])
        left -= len(texts[-1])
    index = {character: number for number, character in enumerate(ALPHABET)}
    unknown = len(ALPHABET) - 1
    corpus = torch.tensor([index.get(character, unknown) for character in "".join(texts)])
    return corpus[: -len(corpus) // 10], corpus[-len(corpus) // 10 :]


def draw(corpus: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of sequences and, for each place, the character that follows."""
    starts = torch.randint(len(corpus) - CONTEXT, (BATCH,), generator=generator)
    sequences = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts])
    return sequences[:, :-1], sequences[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Rises linearly, then falls along a cosine to a tenth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def train_step(ddp: DDP, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One step over the micro-batches; this rank's mean loss."""
    total = torch.zeros(())
    for number, (text, following) in enumerate(batches):
        ddp.require_backward_grad_sync = number == len(batches) - 1  # as nanoGPT does, in place of no_sync()
        loss = ddp(text, following) / len(batches)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def held_out_loss(ddp: DDP, corpus: Tensor) -> float:
    ddp.eval()
    generator = torch.Generator().manual_seed(0)
    loss = sum(ddp.module(*draw(corpus, generator)).item() for _ in range(20)) / 20
    ddp.train()
    return loss


def digest(model: nn.Module) -> str:
    """The first 16 hex digits of the SHA-256 of all weights' bytes."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def train(steps: int, losses_file: str | None) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # what rank 0 draws is what all start from
    ddp = DDP(GPT())
    optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.1, betas=(0.9, 0.99))
    training, held_out = read_corpus()
    generator = torch.Generator().manual_seed(rank)  # every rank reads its own sequences
    losses = torch.zeros(steps)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        losses[step] = train_step(ddp, optimizer, [draw(training, generator) for _ in range(ACCUMULATE)])
        if rank == 0 and (step % 50 == 0 or step == steps - 1):
            latest = losses[max(0, step - 9) : step + 1].mean()  # one step's batch says little
            print(f"step {step:4}  loss {latest:.3f}  {time.monotonic() - began:5.1f} s", flush=True)
    dist.all_reduce(losses)
    report(ddp, (losses / ranks).tolist(), held_out_loss(ddp, held_out), losses_file)
    dist.destroy_process_group()


def report(ddp: DDP, losses: list[float], held_out: float, losses_file: str | None) -> None:
    if dist.get_rank() != 0:
        return
    name = f"{type(ddp).__module__}.{type(ddp).__name__}"
    if losses_file:
        found = {"class": name, "losses": losses, "held_out": held_out, "digest": digest(ddp.module)}
        Path(losses_file).write_text(json.dumps(found))
    print(f"{name}: {held_out:.3f} nats a character on text not trained on, weights {digest(ddp.module)}")


# --- what compares two runs ------------------------------------------------------------------------------


def plot(files: list[str], picture: str) -> None:
    """Both runs' losses over the steps, one drawn upon the other, and their difference below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, second = (json.loads(Path(file).read_text()) for file in files)
    figure, (upper, lower) = plt.subplots(2, sharex=True, height_ratios=(3, 1), figsize=(8, 6), layout="constrained")
    upper.plot(first["losses"], color="#9ecae1", linewidth=5, label=first["class"])
    upper.plot(second["losses"], color="#b30000", linewidth=1, label=second["class"])
    upper.axhline(math.log(len(ALPHABET)), color="gray", linestyle=":")
    upper.annotate(
        f"all {len(ALPHABET)} characters equally likely",
        (len(first["losses"]), math.log(len(ALPHABET))),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        color="gray",
    )
    upper.set(ylabel="loss, nats a character", title="The same script, two classes")
    upper.legend()
    difference = [abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)]
    lower.plot(difference, color="black", linewidth=1)
    lower.set(xlabel="step", ylabel="|difference|", ylim=(-1e-7, max(1e-6, 1.1 * max(difference))))
    figure.savefig(picture, dpi=130)


def compare(files: list[str], picture: str) -> None:
    """Ends with status 1 where the curves differ, or where the model has not learnt."""
    first, second = (json.loads(Path(file).read_text()) for file in files)
    assert first["class"] != second["class"], "both runs had the same class"
    worst = max(abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True))
    print(f"largest difference between the losses of a step: {worst:.1e}; plotted in {os.path.relpath(picture)}")
    if worst > 1e-3 or max(first["held_out"], second["held_out"]) > GOAL:
        sys.exit("the two runs differ, or the model has not learnt")
    print(f"weights {first['digest']} and {second['digest']}")


def run_both(steps: int, ranks: int) -> None:
    OUTPUT.mkdir(exist_ok=True)
    files = [str(OUTPUT / f"10_nanogpt_{name}.json") for name in ("torch", "minddp")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for swap, file in zip(([], ["-m", "minddp.run"]), files, strict=True):
        command = [sys.executable, *torchrun, *swap, __file__, f"--steps={steps}", "--losses", file]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        subprocess.run(command, env=environment, check=True)
    picture = str(OUTPUT / "10_nanogpt.png")
    plot(files, picture)
    compare(files, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each run, where this starts both")
    parser.add_argument("--losses", metavar="FILE", help="writes the losses of a run to this JSON file")
    parser.add_argument("--plot", nargs=3, metavar=("A", "B", "PICTURE"), help="plots two runs' losses")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot[:2], args.plot[2])
    elif "RANK" in os.environ:
        train(args.steps, args.losses)
    else:
        run_both(args.steps, args.ranks)


if __name__ == "__main__":
    main()
