"""One rank of test_containers.py: tries "shm", then trains over "auto", and says what came of both, as JSON.

python container_rank.py RANK RANKS FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import minddp


def main(rank: int, ranks: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    answer = {"shm": "works", "/dev/shm": shutil.disk_usage("/dev/shm").total}
    try:
        dist.new_group(backend="shm")
    except dist.DistBackendError as error:
        answer["shm"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = dist.new_group(backend="auto")
    answer["warnings"] = [str(warning.message) for warning in caught if "auto" in str(warning.message)]
    answer["transport"] = type(group._get_backend(torch.device("cpu"))).__name__
    torch.manual_seed(rank)
    ddp = minddp.DistributedDataParallel(nn.Linear(300, 1000), process_group=group)  # 1.2 MB of gradients
    ddp(torch.randn(4, 300)).square().mean().backward()
    answer["gradient"] = ddp.module.weight.grad.sum().item()
    print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
