"""The functions that minddp adds to a wrapper: where each of them is, and which wrapper it was given.

The class has the names of torch's class and no other public ones, so that ``hasattr(ddp, name)`` answers as it does
with torch's. What minddp adds is a function of the package that takes the wrapper, such as ``minddp.report(ddp)``.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FUNCTIONS", "abort_iteration", "averager_of", "refresh", "release_buckets", "wrapper_of"]

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


# --- those of the core


def abort_iteration(ddp: torch.nn.Module) -> None:
    """Gives up an iteration that an exception has ended, so that the next forward begins a new one.

    For an exception that every rank has met at the same place and caught: call it on all of them, then zero the
    gradients (they are local, or half averaged). Where only some ranks failed, the others' collectives are still
    under way and would meet the wrong ones: restart from a checkpoint instead.
    """
    averager = wrapper_of(ddp, "abort_iteration")._minddp_averager
    if averager is not None:
        averager.abort_iteration()


def release_buckets(ddp: torch.nn.Module) -> None:
    """Frees the buckets' memory between phases of training; the next backward allocates it again.

    Raises:
        RuntimeError: an iteration is under way, or every parameter's reduction is delayed.
    """
    averager_of(ddp, "release_buckets").reducer.release_buckets()


def refresh(ddp: torch.nn.Module) -> None:
    """Takes over what has changed in the module since it was wrapped. Collective, between iterations.

    Parameters may have been added, replaced, removed, frozen, unfrozen, cast or moved, on all ranks alike. All
    ranks' parameters and buffers become rank 0's. Buckets are cut anew, as after construction: a pinned plan no
    longer holds, ``"auto"`` measures again. A communication hook stays; one that keeps state for each bucket has
    to forget it. New parameters have to be given to the optimizer.

    Raises:
        RuntimeError: the last backward was not finished, the ranks' modules differ (on every rank), or nothing
            requires a gradient any more.
        ValueError: ``gradient_as_bucket_view`` does not go with a parameter's new dtype.
        NotImplementedError: with ``mixed_precision``, delayed parameters or an optimizer in backward.
    """
    wrapper = wrapper_of(ddp, "refresh")
    averager, wrapped, observers = wrapper._minddp_averager, wrapper._minddp_wrapped, wrapper._minddp_observers
    if averager is not None:
        averager.check_finished()
    for call in observers.refreshing:
        call(wrapper)
    wrapped.collect()
    wrapper.device_ids, wrapper.output_device = wrapped.check_devices(wrapper.device_ids, wrapper.output_device)
    wrapper._minddp_synchronize_model()
    averager.rebuild()
