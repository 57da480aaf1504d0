"""16. A rank is killed: what the others read.

    python tutorials/16_a_rank_is_killed.py

Three ranks train. In its third step rank 2 is killed, as by a machine that runs out of memory: SIGKILL, without a
word. The program runs twice, with PyTorch's class and with minddp's. It prints what the other ranks' errors say, and
how long after the kill they come.
"""

import os
import signal
import tempfile
import textwrap
import time
from typing import Any

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import minddp

RANKS, KILLED = 3, 2
CLASSES = {"PyTorch's class": nn.parallel.DistributedDataParallel, "minddp": minddp.DistributedDataParallel}

# %% [markdown]
# ## The program
#
# It is the same for both classes. Rank 2 kills itself before its backward, so the others wait for its gradients.

# %%


def train(rank: int, name: str, store: str, killed_at: Any, told: Any) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = CLASSES[name](nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(5):
            loss = model(torch.randn(4, 8)).square().mean()
            if rank == KILLED and step == 2:
                killed_at.value = time.time()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        lost = getattr(error, "lost_ranks", None)
        told.put((rank, type(error).__name__, str(error), lost, time.time() - killed_at.value))


def run(name: str) -> list[tuple[Any, ...]]:
    """What each surviving rank has read, by rank."""
    spawn = torch.multiprocessing.get_context("spawn")
    killed_at, told = spawn.Value("d", 0.0), spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, f"file://{folder}/store", killed_at, told)
        ranks = [spawn.Process(target=train, args=(rank, *arguments)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        found = sorted(told.get() for _ in range(RANKS - 1))
        for rank in ranks:
            rank.join()
    return found


# %% [markdown]
# ## What they read
#
# PyTorch's error is Gloo's: a connection is closed, to an address. With many ranks nobody knows whose. minddp's is a
# `minddp.LostPeer`: it names rank, process, host and signal, and `lost_ranks` has the numbers for a program.

# %%


def main() -> None:
    for name in CLASSES:
        print(f"{name}:")
        for rank, kind, text, lost, seconds in run(name):
            told = textwrap.shorten(text, 330, placeholder=" …")
            print(textwrap.indent(textwrap.fill(f"rank {rank}, after {seconds:.1f} s: {kind}: {told}", 100), "   "))
            if name == "minddp":
                assert lost == [KILLED] and f"rank {KILLED}" in text and "SIGKILL" in text
        print()


if __name__ == "__main__":
    main()
