"""``minddp doctor``: what is installed and built, what works here (``shm`` included), and a step on ranks.

    minddp doctor                 # everything; exit status 1 if something was not seen to work
    minddp doctor --no-step       # only what is installed

The step trains one batch with torch's class and with minddp's on each backend that works here, and compares the
gradients, bit for bit. It runs on two ranks; with NCCL on one rank, whose buckets go through the group all the same,
and on two where there are two GPUs. The ranks have 120 s from when all of them have imported minddp.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .. import shm
from .._extension import build_record
from .._extension import config as build_config
from ..ddp import DistributedDataParallel

__all__ = ["main"]

_START_METHOD = "spawn"
_START_SECONDS = 600.0  # in which all ranks have imported minddp
_STEP_SECONDS = 120.0  # in which they then have taken the step


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("minddp doctor", description=__doc__, formatter_class=layout)
    parser.add_argument("--no-step", action="store_true", help="start no ranks")
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    print(build_config())
    for name, text in (("machine", _machine()), ("GPUs", _gpus()), ("backends", ", ".join(_backends()))):
        print(f"  {name}: {text}")
    if options.no_step:
        return 0
    print("one step, beside torch's class:")
    failed = False
    for backend, ranks in _trials():
        answer = _try_step(backend, ranks)
        print(f"  {backend}, {ranks} rank{'s' * (ranks > 1)}: {answer}")
        failed |= not answer.startswith("ok")
    return int(failed)


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores for this process, {memory:.0f} GiB of memory"


def _gpus() -> str:
    built = build_record()["cuda"]
    if not torch.cuda.is_available():
        return "none" + (f" (minddp is built for CUDA {built})" if built else "")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) + ("" if built else "; but minddp is built without CUDA: build it with nvcc on PATH")


def _backends() -> list[str]:
    """What process groups can be made of here."""
    offered = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    offered |= {"mpi": dist.is_mpi_available(), shm.BACKEND: shm.is_available()}
    return [name for name, works in offered.items() if works]


def _trials() -> list[tuple[str, int]]:
    """What a step is tried on: backends, and how many ranks."""
    backends = _backends()
    trials = [(backend, 2) for backend in backends if backend in ("gloo", shm.BACKEND)]
    if "nccl" in backends:
        trials += [("nccl", ranks) for ranks in (1, 2) if ranks <= torch.cuda.device_count()]
    return trials


def _try_step(backend: str, ranks: int) -> str:
    """One line on the step: "ok", or what is wrong."""
    method = mp.get_context(_START_METHOD)
    here, differing = method.Semaphore(0), method.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="minddp-doctor-", ignore_cleanup_errors=True) as folder:
        arguments = (ranks, backend, os.path.join(folder, "store"), here, differing, _step)
        started = mp.start_processes(_rank_main, arguments, ranks, join=False, start_method=_START_METHOD)
        try:
            ended = _wait(started, here, ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return f"failed. rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
        finally:
            for process in started.processes:
                process.kill()
                process.join()
    if not ended:
        return f"too slow to tell: not all ranks have ended within {_STEP_SECONDS:.0f} s"
    wrong = {rank: names for rank, names in sorted(differing.get() for _ in range(ranks)) if names}
    return f"other gradients than torch's: {wrong}" if wrong else "ok, the same gradients"


def _wait(started: mp.ProcessContext, here: Semaphore, ranks: int) -> bool:
    """Whether all ranks have ended in time; raises what ended one of them."""
    deadline, importing = time.monotonic() + _START_SECONDS, True
    while not started.join(timeout=0.1):
        if importing and here.get_value() == ranks:
            deadline, importing = time.monotonic() + _STEP_SECONDS, False
        if time.monotonic() > deadline:
            return False
    return True


def _rank_main(
    rank: int, ranks: int, backend: str, store: str, here: Semaphore, differing: Any, step: Callable[..., list[str]]
) -> None:
    here.release()  # Python has imported this module, and torch with it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MINDDP_ALWAYS_REDUCE"] = "1"  # one rank alone goes through its group, too
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    dist.barrier()  # a rank that ends at once must not close while others still connect
    differing.put((rank, step(rank, "cuda" if backend == "nccl" else "cpu")))
    dist.destroy_process_group()


def _step(rank: int, device: str) -> list[str]:
    """On a rank: the names of the gradients that are not, bit for bit, those of torch's class."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    gradients: list[dict[str, Any]] = []
    for wrap in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
        torch.manual_seed(1 + rank)
        wrap(model)(torch.randn(4, 8).to(device)).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    theirs, ours = gradients
    return [name for name in theirs if not torch.equal(theirs[name], ours[name])]
