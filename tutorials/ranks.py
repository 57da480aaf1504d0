"""``run_ranks(fn, 2, *args)``: what ``fn(rank, 2, *args)`` returns on two ranks of this machine, in their order."""

import multiprocessing
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(["__main__", "minddp"])  # imported once, for all ranks


def run_ranks(fn, world_size, *arguments, timeout=600.0):
    """Each rank is a process inside of a Gloo group. Raises torch.multiprocessing's error where one raises or dies.

    A rank that has not ended after ``timeout`` seconds is killed, and gives None.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ranks = mp.start_processes(
            _rank, (world_size, folder, fn, arguments), world_size, join=False, start_method="forkserver"
        )
        end = time.monotonic() + timeout
        while not ranks.join(timeout=0.1):
            if time.monotonic() > end:
                for process in ranks.processes:
                    process.kill()
                    process.join()
                break
        files = [os.path.join(folder, str(rank)) for rank in range(world_size)]
        return [torch.load(file, weights_only=False) if os.path.exists(file) else None for file in files]


def _rank(rank, world_size, folder, fn, arguments):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # a rank that ends at once must not close while others still connect
    result = fn(rank, world_size, *arguments)
    torch.save(result, part := os.path.join(folder, f"{rank}.part"))
    os.replace(part, os.path.join(folder, str(rank)))  # whole, or not there
    dist.destroy_process_group()
