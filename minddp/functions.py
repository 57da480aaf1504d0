"""The functions that minddp adds to a wrapper: where each of them is, and what public functions are given.

The class has the names of torch's class and no other public ones, so that ``hasattr(ddp, name)`` answers as it does
with torch's. What minddp adds is a function of the package that takes the wrapper, such as ``minddp.report(ddp)``.

All public functions and classes look at what they are given here: at wrappers, groups and modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .messages import was_destroyed

__all__ = [
    "FUNCTIONS", "abort_iteration", "averager_of", "group_of", "module_of", "refresh", "refuse_left",
    "release_buckets", "wrapper_of",
]  # fmt: skip

# Function -> the module of this package that defines it. The package imports that module when the name is asked for.
FUNCTIONS = {
    "abort_iteration": "functions",
    "add_weight": "reductions.weights",
    "bucket_plan": "planner.observer",
    "check_replicas": "guards.check",
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
    """
    return wrapper_of(ddp, function)._minddp_averager


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


def group_of(group: Any, function: str, argument: str = "process_group") -> Any:
    """The process group that ``function`` works with: the one that it was given, or the default one for ``None``.

    Args:
        group: what was given as ``argument``.
        function: the public function's or class's name, for the message.

    Raises:
        TypeError: it is no process group.
        ValueError: none was given, and there is no default one.
        RuntimeError: this process is not in it, or it was destroyed.
    """
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                f"{function} needs a process group: call torch.distributed.init_process_group() on every rank first "
                f"(torchrun sets what it reads), or pass {argument}=."
            )
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        if was_destroyed(group):
            raise RuntimeError(
                f"{function}: {argument}{_here()} was destroyed: pass one that torch.distributed.new_group() returns."
            )
        return group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(
            f"{function}: {argument}: this rank is not a member of the group{_here()}. Only its members may call it."
        )
    raise TypeError(f"{function}: {argument} must be a torch.distributed.ProcessGroup, or None, got {group!r}")


def _here() -> str:
    return f" (on rank {dist.get_rank()} of the default group)" if dist.is_initialized() else ""


def module_of(module: Any, function: str, argument: str = "module") -> torch.nn.Module:
    """``module``, which ``function`` was given as ``argument``.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{function}: {argument} must be a torch.nn.Module, got {type(module).__name__}")
    return module


def refuse_left(function: str, given: Iterable[str], left: Mapping[str, str]) -> None:
    """Refuses ``given``, the names of arguments that ``function`` does not take.

    Args:
        left: arguments that it took once, with the way out.

    Raises:
        TypeError: there is such a name.
    """
    for name in given:
        if name in left:
            raise TypeError(f"{function} no longer has the argument {name!r}. {left[name]}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


# --- those of the core


def abort_iteration(ddp: torch.nn.Module) -> None:
    """Gives up an iteration that an exception has ended, so that the next forward begins a new one.

    For an exception that every rank has met at the same place and caught: call it on all of them, then zero the
    gradients (they are local, or half averaged). Where only some ranks failed, the others' collectives are still
    under way and would meet the wrong ones: restart from a checkpoint instead.
    """
    averager_of(ddp, "abort_iteration").abort_iteration()


def release_buckets(ddp: torch.nn.Module) -> None:
    """Frees the buckets' memory between phases of training; the next backward allocates it again.

    Raises:
        RuntimeError: an iteration is under way.
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
    averager.check_finished()
    for call in observers.refreshing:
        call(wrapper)
    wrapped.collect()
    wrapper.device_ids, wrapper.output_device = wrapped.check_devices(wrapper.device_ids, wrapper.output_device)
    wrapper._minddp_synchronize_model()
    averager.rebuild()
