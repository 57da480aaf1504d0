"""PyTorch's own DDP tests that want a GPU for each rank, on one GPU over NCCL: in every rank "cuda:N" means "cuda:0".

    python benchmarks/nccl/conform.py --impl minddp -k "no_sync|static"
    python benchmarks/nccl/conform.py --impl torch -k "no_sync|static"      # the same tests with torch's class
    ... --device cpu                                # a dry run: "cuda:N" means "cpu", "nccl" means "gloo"

The tests are those of the installed torch that `tests/conformance` lists for two ranks. It forks ranks from a process
that has imported the tests and has not touched CUDA. A ``TorchFunctionMode`` in each rank maps the device of whatever
torch function is called; the names of ``torch.cuda`` that take an index are rebound.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from world import COMMON, ROOT, WAYS, environment, without_places

sys.path.insert(0, str(ROOT))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking for GPUs does not touch CUDA before the fork

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.conformance import cases, cpu_for_cuda, zygote

Answer = dict[str, Any]
WORLD_SIZE = 2


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


def run_all(test_class: Any, names: list[str], options: argparse.Namespace) -> list[Answer]:
    """As many as the limit allows, ``--jobs`` at a time, each job in a process of its own."""
    began, workers = time.monotonic(), []
    zygote.test_class = test_class

    def start(*args: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=zygote.answer, args=args)
        process.start()
        return process

    with tempfile.TemporaryDirectory(prefix="minddp-conform-") as folder:
        for job in range(options.jobs):
            if worker := os.fork():
                workers.append(worker)
                continue
            with (Path(folder) / str(job)).open("w") as answers:
                for name in names[job :: options.jobs]:
                    left = options.limit - (time.monotonic() - began)
                    if left < 8:
                        break
                    answer = zygote.run_case(start, name, min(options.timeout, left))
                    print(json.dumps({"name": name, **answer}), file=answers, flush=True)
                    print(f"  {answer['outcome']:8}{name}{_why(answer)}", flush=True)
            os._exit(0)
        for worker in workers:
            os.waitpid(worker, 0)
        return [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]


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
    parser.add_argument("-k", default="", help="of tests with this in their names: a regular expression")
    parser.add_argument("--first", default="", help="those that begin, since not all may be reached: likewise")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    began, test_class = time.monotonic(), test_class_for(options)
    passes = [c.name for c in cases.read_passes() if (c.module, c.world_size) == ("distributed_test", WORLD_SIZE)]
    names = [name for name in passes if re.search(options.k, name) and hasattr(test_class, name)]
    names.sort(key=lambda name: re.search(options.first, name) is None)
    print(f"{len(names)} of PyTorch's tests with {options.impl}'s class, {options.jobs} at a time", flush=True)
    answers = run_all(test_class, names, options)
    found = {kind: [a["name"] for a in answers if a["outcome"] == kind] for kind in ("passed", "failed", "skipped")}
    missed = sorted(set(names) - {answer["name"] for answer in answers})
    counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in found.items())
    closing = f"{counts}, {len(missed)} not reached, {time.monotonic() - began:.0f} s"
    print(closing)
    if options.output is not None:
        table = [closing, *(f"  failed {a['name']}{_why(a)}" for a in answers if a["outcome"] == "failed")]
        options.output.write_text(json.dumps({**found, "not_reached": missed, "table": table}) + "\n")
    return 0 if found["passed"] and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
