"""Who this rank is, and its default group: what `rank.py` and all that it runs know. Imports nothing of minddp."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # minddp as built in place

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CUDA = os.environ["DEVICE"] == "cuda"
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
GROUP_SECONDS = {"late": 8.0, "stay": 12.0, "stop": 12.0}  # a late rank sleeps for 14 s
Write = Callable[[str], None]


def begin(seconds: float) -> None:
    if CUDA:
        torch.cuda.set_device(DEVICE)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=timedelta(seconds=seconds))


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()
