"""Finds a model's buckets before training and writes them as a plan of the companion ``planner``.

    minddp tune --model my_models:make_resnet --input 8x3x224x224 --ranks 2 --out plan.json
    torchrun --nproc-per-node 8 -m minddp tune --model my_models:make --backend nccl --out plan.json

``--model module:factory`` names a function without arguments. It returns either a module, which is
then fed standard normal tensors of the ``--input`` shapes, its outputs summed as a loss; or a module
and a function ``loss(model) -> scalar tensor`` that runs forward on data of its own choosing. Run it on
the ranks and links that will train: the plan is for those. Then

    ddp = minddp.DistributedDataParallel(module, bucket_plan=BucketPlan.load("plan.json"))

No optimizer runs, so the parameters stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..ddp import DistributedDataParallel
from ..planner import BucketPlan
from ..planner.autotune import AutoTuner, TunerSettings

__all__ = ["TuneError", "load_workload", "main", "tune"]

Loss = Callable[[torch.nn.Module], torch.Tensor]


class TuneError(Exception):
    """What the user asked for cannot be done; the text says what to change."""


def tune(ddp: Any, loss: Loss, settings: TunerSettings | None = None) -> BucketPlan:
    """Runs steps of ``loss(ddp).backward()`` until ``bucket_cap_mb="auto"`` has settled.

    A collective: every rank calls it at the same point, before ``ddp`` has run a step. ``ddp`` keeps the
    tuned buckets.

    Raises:
        TuneError: ``ddp`` does not tune itself, there is one rank only, or no plan could be made.
    """
    tuner: AutoTuner | None = ddp._minddp_observers.get("planner").tuner
    if tuner is None:
        raise TuneError('nothing tunes this module: construct it with bucket_cap_mb="auto"')
    if tuner.settled:
        raise TuneError("one rank has nothing to communicate, so no buckets to tune: use at least 2 ranks")
    tuner.settings = settings if settings is not None else tuner.settings
    while not tuner.settled:
        ddp.zero_grad(set_to_none=True)
        loss(ddp).backward()
    if tuner.plan is None:
        raise TuneError("no plan could be made; rank 0's warning says why")
    return tuner.plan


def load_workload(model: str, inputs: Iterable[str], device: torch.device) -> tuple[torch.nn.Module, Loss]:
    """The module and loss that ``--model`` and ``--input`` name, on ``device``.

    Raises:
        TuneError: the name leads nowhere, the factory returns something else, or a shape is none.
    """
    made = _import_factory(model)()
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module) or not (loss is None or callable(loss)):
        raise TuneError(f"--model {model} returned {type(made).__name__}: return a module, or (module, loss)")
    module.to(device)
    if loss is not None:
        return module, loss
    tensors = [torch.randn(_parse_shape(shape), device=device) for shape in inputs]
    if not tensors:
        raise TuneError(f"--model {model} returned a module alone: add --input, such as --input 8x1024")
    return module, lambda wrapped: _summed(wrapped(*tensors))


def _import_factory(model: str) -> Callable[[], Any]:
    name, colon, attribute = model.partition(":")
    if not (name and colon and attribute):
        raise TuneError(f"--model {model!r} is not of the form module:factory")
    try:
        factory = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise TuneError(f"--model {model}: {error} (searched from {os.getcwd()})") from error
    if not callable(factory):
        raise TuneError(f"--model {model}: {attribute} is no function but {type(factory).__name__}")
    return factory


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(extent) for extent in text.split("x"))
    except ValueError:
        shape = (0,)
    if min(shape) < 1:
        raise TuneError(f"--input {text!r} is no shape: write extents joined by x, such as 8x3x224x224")
    return shape


def _summed(output: Any) -> torch.Tensor:
    """The sum of every tensor in an output, however nested in tuples, lists and mappings."""
    if isinstance(output, torch.Tensor):
        return output.float().sum()
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)) and output:
        return torch.stack([_summed(part) for part in output if part is not None]).sum()
    raise TuneError(f"the model returned {type(output).__name__}: let the factory return (module, loss)")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="minddp tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help="such as 8x1024; repeatable")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the plan goes, as JSON")
    parser.add_argument("--ranks", type=int, help="start so many ranks here; not under torchrun")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda with nccl, else cpu")
    parser.add_argument("--laps", type=int, default=TunerSettings.laps, help="how often finalists are measured")
    parser.add_argument("--iterations", type=int, default=TunerSettings.measured_iterations, help="per trial and lap")
    return parser.parse_args(arguments)


def _check_workload(options: argparse.Namespace) -> None:
    _import_factory(options.model)
    for shape in options.input:
        _parse_shape(shape)


def _start_ranks(ranks: int | None, arguments: list[str]) -> int:
    if ranks is None or ranks < 2:
        raise TuneError("start this under torchrun, or give --ranks with at least 2")
    try:
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={ranks}", "-m", "minddp", "tune", *arguments])
    except ChildFailedError:  # the ranks have said why
        return 2
    return 0


def _device(options: argparse.Namespace) -> torch.device:
    kind = options.device or ("cuda" if options.backend == "nccl" else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _tune_rank(options: argparse.Namespace) -> None:
    """What each rank does, inside an initialized default group."""
    device = _device(options)
    torch.manual_seed(0)
    module, loss = load_workload(options.model, options.input, device)
    device_ids = [device.index] if device.type == "cuda" else None
    settings = TunerSettings(laps=options.laps, measured_iterations=options.iterations)
    ddp = DistributedDataParallel(module, device_ids=device_ids, bucket_cap_mb="auto")
    plan = tune(ddp, loss, settings)
    if dist.get_rank() == 0:
        plan.save(options.out)
        print(plan, f"written to {options.out}", sep="\n", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    sys.path.insert(0, os.getcwd())
    try:
        folder = os.path.dirname(os.path.abspath(options.out))
        if not os.access(folder, os.W_OK):
            raise TuneError(f"--out {options.out}: the folder {folder} is not there or not writable")
        if "RANK" not in os.environ:
            _check_workload(options)  # once, before every rank says the same
            return _start_ranks(options.ranks, arguments)
        dist.init_process_group(options.backend)
        try:
            _tune_rank(options)
        finally:
            dist.destroy_process_group()
    except TuneError as error:
        print(f"minddp tune: {error}\n", end="", file=sys.stderr)  # in one piece: each rank writes it
        return 2
    return 0
