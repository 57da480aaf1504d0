"""PyTorch's own DDP tests that want a GPU for each rank, on one GPU over NCCL: in every rank "cuda:N" means "cuda:0".

    python benchmarks/nccl/conform.py --impl minddp -k "no_sync|static"
    python benchmarks/nccl/conform.py --impl torch -k "no_sync|static"      # the same tests with torch's class
    ... --device cpu                                # a dry run: "cuda:N" means "cpu", "nccl" means "gloo"

The tests are those of the installed torch that `tests/conformance` lists for two ranks. It forks ranks from a process
that has imported the tests and has not touched CUDA. A ``TorchFunctionMode`` in each rank maps the device of whatever
torch function is called; the names of ``torch.cuda`` that take an index are rebound.

Each answer is printed, and stands in ``--output``, as soon as it is there. Those that tell most (:data:`TELLING`)
begin, and the others follow by the seconds that they take. ``--limit`` counts from the start of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from world import BEGAN, COMMON, ROOT, WAYS, Told, environment, without_places

sys.path.insert(0, str(ROOT))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking for GPUs does not touch CUDA before the fork

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.conformance import cases, cpu_for_cuda, zygote

Answer = dict[str, Any]
WORLD_SIZE = 2

# One test for each thing that a card may do otherwise than the CPU, in the order in which one wants to know it.
TELLING = (
    "grads_same_across_ranks_with_no_sync", "accumulate_gradients_no_sync", "ddp_hook_parity_allreduce",
    "skip_all_reduce_unused_parameters", "accumulate_gradients_no_sync_allreduce_with_then_hook",
    "ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none", "ddp_broadcast_buffer",
    "ddp_join_model_equivalence", "ddp_shared_grad_acc_unused_params", "ddp_hook_parity_powerSGD",
    "ddp_model_diff_num_params_across_ranks", "ddp_python_error_logged",
    "DistributedDataParallel_with_amp_and_grad_is_view",
)  # fmt: skip


def is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class OneDevice(TorchFunctionMode):
    """Every CUDA device, and every bare index where a device belongs, is ``target``."""

    def __init__(self, target: torch.device):
        super().__init__()
        self.target = target

    def moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self.target if value.type == "cuda" else value
        named = isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value)
        return str(self.target) if named else value

    def moved_index(self, value: Any) -> Any:
        return self.target if is_index(value) else self.moved(value)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = self.moved_index(kwargs["device"])
        name = getattr(function, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            kept = {key: value for key, value in kwargs.items() if key in ("non_blocking", "memory_format")}
            return args[0].to(self.target, **kept)
        if name == "to" and len(args) > 1:
            args = (args[0], self.moved_index(args[1]), *args[2:])
        else:
            args = tuple(arg if isinstance(arg, torch.Tensor) else self.moved(arg) for arg in args)
        return function(*args, **kwargs)


def rebind(ddp_class: Any, mode: OneDevice) -> None:
    """What a function mode does not see: the class's own arguments, loading, modules, ``torch.cuda``."""
    on_gpu = mode.target.type == "cuda"
    construct, load, barrier, to = ddp_class.__init__, torch.load, dist.barrier, torch.nn.Module.to

    @functools.wraps(construct)
    def on_one(self: Any, module: Any, ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        ids = kwargs.pop("device_ids", ids)
        on_cpu = not on_gpu or all(p.device.type == "cpu" for p in module.parameters())
        construct(self, module, None if on_cpu or ids is None else [0], None, *args, **kwargs)

    def load_here(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {str(mode.moved(key)): str(mode.moved(value)) for key, value in map_location.items()}
        return load(file, mode.moved(map_location), *args, **kwargs)

    rebound: Any = torch
    ddp_class.__init__ = on_one
    rebound.load = load_here
    rebound.distributed.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    rebound.nn.Module.to = lambda self, *args, **kwargs: to(self, *map(mode.moved_index, args), **kwargs)
    rebound.nn.Module.cuda = lambda self, device=None: to(self, mode.target)
    rebound.nn.Conv2d = cpu_for_cuda._CoarseConv2d
    if not on_gpu:
        cpu_for_cuda._rebind_cuda()
        cpu_for_cuda._rebind_groups()
        return
    rebound.cuda.device_count = lambda: WORLD_SIZE
    for name in ("synchronize", "current_stream", "default_stream", "reset_peak_memory_stats"):
        setattr(rebound.cuda, name, _on_first(getattr(torch.cuda, name)))
    set_device = torch.cuda.set_device
    rebound.cuda.set_device = lambda device: set_device(0)

    class First(torch.cuda.device):
        def __init__(self, device: Any = None):
            super().__init__(0)

    rebound.cuda.device = First


def _on_first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None, *args, **kwargs: function(None if device is None else 0, *args, **kwargs)


def test_class_for(options: argparse.Namespace) -> Any:
    """PyTorch's test class, with the class to be tested, the ranks' environments and their one device."""
    on_gpu = options.device == "cuda"
    os.environ.update(COMMON)
    os.environ.update(zygote.environment(options.impl, "distributed_test", WORLD_SIZE))
    os.environ["BACKEND"] = "nccl" if on_gpu else "gloo"
    ddp_class = zygote.swap_in(options.impl)
    cpu_for_cuda.open_gates()
    test_class: Any = zygote.case_class("distributed_test")
    mode = OneDevice(torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    rebind(ddp_class, mode)
    zygote.count_constructions(ddp_class)
    run = test_class._run.__func__

    def in_rank(cls: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
        os.environ.update(environment(options.way, options.device, rank))
        if on_gpu:
            torch.cuda.set_device(0)
        with mode:
            return run(cls, rank, *args, **kwargs)

    test_class._run = classmethod(in_rank)
    return test_class


def in_order(found: list[cases.Case]) -> list[str]:
    """Names: :data:`TELLING` in its order, then the quick ones before the slow ones."""
    ranks = {f"test_{name}": rank for rank, name in enumerate(TELLING)}
    return [case.name for case in sorted(found, key=lambda case: (ranks.get(case.name, len(ranks)), case.seconds))]


def run_all(
    test_class: Any,
    names: list[str],
    options: argparse.Namespace,
    take: Callable[[Answer], None],
    stopped: Callable[[], None],
) -> None:
    """As many as the limit allows, ``--jobs`` at a time; ``take`` gets each answer as it comes.

    SIGTERM ends all that it has started, calls ``stopped``, and exits with 124.
    """
    zygote.test_class = test_class
    forks, pipes = multiprocessing.get_context("fork"), []
    jobs: list[Any] = []
    stop = threading.Event()
    following = forks.Value("i")
    for _ in range(options.jobs):
        ours, theirs = forks.Pipe(duplex=False)
        job = forks.Process(target=_job, args=(names, following, options, theirs))
        job.start()
        jobs.append(job)
        theirs.close()
        pipes.append(ours)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while pipes and not stop.is_set():
            for pipe in multiprocessing.connection.wait(pipes, 0.1):
                try:
                    take(pipe.recv())
                except EOFError:
                    pipes.remove(pipe)
    finally:  # where nobody reads what is printed, too
        for job in jobs:
            if pipes:
                _end(job.pid)
            job.join()
    if stop.is_set():
        stopped()
        os._exit(124)


def _end(job: int) -> None:
    """Ends a job and the test that it runs, whose processes are a group of their own."""
    with contextlib.suppress(OSError):
        os.kill(job, signal.SIGSTOP)  # it starts no other
        for children in Path(f"/proc/{job}/task").glob("*/children"):
            for case in map(int, children.read_text().split()):
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError):
                        kill(case, signal.SIGKILL)
        os.kill(job, signal.SIGKILL)


def _job(names: list[str], following: Any, options: argparse.Namespace, pipe: Any) -> None:
    """One test after the other, each in a process of its own."""

    def start(*args: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=zygote.answer, args=args)
        process.start()
        return process

    while (left := options.limit - (time.monotonic() - BEGAN)) > 8:
        with following.get_lock():
            number, following.value = following.value, following.value + 1
        if number >= len(names):
            return
        pipe.send({"name": names[number], **zygote.run_case(start, names[number], min(options.timeout, left))})


def _why(answer: Answer) -> str:
    if answer["outcome"] == "passed":
        return ""
    lines = answer["message"].splitlines() + answer["output"].splitlines()
    told = [line for line in lines if "Error" in line or "Exception" in line] or lines
    return without_places(": " + " / ".join(told[-2:]))[:300]


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--impl", default="minddp", choices=["minddp", "torch"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--way", default="hostid", choices=WAYS)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=150, help="seconds for all of them")
    parser.add_argument("--timeout", type=float, default=40, help="seconds for one")
    parser.add_argument("--telling", action="store_true", help="the most telling alone")
    parser.add_argument("-k", default="", help="of tests with this in their names: a regular expression")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    found = [c for c in cases.read_passes() if (c.module, c.world_size) == ("distributed_test", WORLD_SIZE)]
    names = in_order([c for c in found if re.search(options.k, c.name)])
    names = names[: len(TELLING)] if options.telling else names
    told = Told(options.output)
    told.facts |= {"passed": [], "failed": [], "skipped": [], "not_reached": names}
    first = ", ".join(name.removeprefix("test_") for name in names[:6])
    told.say(f"{len(names)} of PyTorch's tests with {options.impl}'s class, {options.jobs} at a time; first {first}")

    def take(answer: Answer) -> None:
        names.remove(answer["name"])
        told.facts[answer["outcome"]].append(answer["name"])
        told.say(f"  {answer['outcome']:8}{answer['seconds']:6.1f} s  {answer['name']}{_why(answer)}")

    test_class = test_class_for(options)
    names[:] = [name for name in names if hasattr(test_class, name)]
    run_all(test_class, list(names), options, take, lambda: told.say("stopped: no time left"))
    counts = ", ".join(f"{len(told.facts[kind])} {kind}" for kind in ("passed", "failed", "skipped"))
    told.say(f"{counts}, {len(names)} not reached, {time.monotonic() - BEGAN:.0f} s")
    return 0 if told.facts["passed"] and not told.facts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
