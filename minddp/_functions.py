"""The functions that minddp adds to a wrapper: where each of them is, and which wrapper it was given.

The class has the names of torch's class and no other public ones, so that ``hasattr(ddp, name)`` answers as it does
with torch's. What minddp adds is a function of the package that takes the wrapper, such as ``minddp.report(ddp)``.
"""

from __future__ import annotations

from typing import Any

import torch

# Function -> the module of this package that defines it. The package imports that module when the name is asked for.
FUNCTIONS = {
    "abort_iteration": "functions",
    "add_weight": "reductions.weights",
    "bucket_plan": "planner.observer",
    "check_replicas": "guards.check",
    "clear_weight": "reductions.weights",
    "last_step": "timeline.step_times",
    "load_wire_state": "wire.format",
    "refresh": "functions",
    "release_buckets": "functions",
    "repair_replicas": "guards.check",
    "report": "straggler.exchange",
    "skipped_steps": "guards.finite_check",
    "wire_state": "wire.format",
}


def wrapper_of(ddp: Any, function: str) -> Any:
    """The wrapper that ``minddp.<function>(ddp)`` was given: ``ddp``, or the one that ``torch.compile(ddp)`` runs.

    Raises:
        TypeError: it is neither; says what to pass.
    """
    module = ddp
    while isinstance(module, torch.nn.Module):
        if "_minddp_averager" in vars(module):
            return module
        module = module._modules.get("_orig_mod")  # of torch.compile
    raise TypeError(f"minddp.{function}: ddp must be a minddp.DistributedDataParallel, got {_described(ddp)}")


def averager_of(ddp: Any, function: str) -> Any:
    """The averager of the wrapper that ``minddp.<function>(ddp)`` was given.

    Raises:
        TypeError: see :func:`wrapper_of`.
        RuntimeError: the wrapper has none.
    """
    averager = wrapper_of(ddp, function)._minddp_averager
    if averager is None:
        raise RuntimeError(
            f"minddp.{function}: this wrapper has no buckets, since every parameter is in "
            "delay_all_reduce_named_params=: leave one out of it."
        )
    return averager


def _described(given: Any) -> str:
    """What was given in a wrapper's place, and what to do."""
    kind = type(given)
    if isinstance(given, torch.nn.parallel.DistributedDataParallel):
        return (
            f"torch's {kind.__name__}. Construct minddp.DistributedDataParallel, or call minddp.install() before the "
            "program constructs its wrapper."
        )
    if not isinstance(given, torch.nn.Module):
        return f"{kind.__name__}."
    for name, module in given.named_modules():
        if "_minddp_averager" in vars(module):
            return f"{kind.__name__}. The wrapper is its submodule {name!r}: pass that."
    return f"{kind.__name__}, a module that is not wrapped. Pass the wrapper around it."
