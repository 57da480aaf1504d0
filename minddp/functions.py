"""What a program may ask of a wrapper between two iterations: to give one up, to free memory, to take over changes,
and which buckets there are."""

from __future__ import annotations

import torch

from ._functions import engine_of, wrapper_of
from .parameters import localize_shards
from .planner import BucketPlan

__all__ = ["abort_iteration", "bucket_plan", "refresh", "release_buckets"]


def abort_iteration(ddp: torch.nn.Module) -> None:
    """Gives up an iteration that an exception has ended, so that the next forward begins a new one.

    For an exception that every rank has met at the same place and caught: call it on all of them, then zero the
    gradients (they are local, or half averaged). Where only some ranks failed, the others' collectives are still
    under way and would meet the wrong ones: restart from a checkpoint instead.
    """
    engine = wrapper_of(ddp, "abort_iteration")._minddp_engine
    if engine is not None:
        engine.abort_iteration()


def release_buckets(ddp: torch.nn.Module) -> None:
    """Frees the buckets' memory between phases of training; the next backward allocates it again.

    Raises:
        RuntimeError: an iteration is under way, or every parameter's reduction is delayed.
    """
    engine_of(ddp, "release_buckets").reducer.release_buckets()


def bucket_plan(ddp: torch.nn.Module) -> BucketPlan:
    """The buckets in force as a :class:`minddp.planner.BucketPlan`: save it, pin it with ``bucket_plan=``.

    Raises:
        RuntimeError: every parameter's reduction is delayed.
    """
    plan: BucketPlan = engine_of(ddp, "bucket_plan").bucket_plan
    return plan


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
    engine, wrapped = wrapper._minddp_engine, wrapper._minddp_wrapped
    delayed, steps = wrapper._minddp_delayed is not None, wrapper._minddp_steps_in_backward
    if engine is None or engine.mixed is not None or delayed or steps:
        raise NotImplementedError(
            "minddp.refresh does not go with mixed_precision=, delay_all_reduce_named_params= or an optimizer in "
            "backward, which hold on to parameters: construct the wrapper anew."
        )
    engine.check_finished()
    localize_shards(wrapper.module, wrapper.process_group)
    wrapped.collect()
    wrapper._minddp_config.check_views([p.dtype for p in wrapped.reduced])
    wrapper.device_ids, wrapper.output_device = wrapped.check_devices(wrapper.device_ids, wrapper.output_device)
    wrapper._minddp_synchronize_model()
    wrapper._minddp_config = engine.replaced(bucket_plan=None)
    engine.rebuild(wrapper._minddp_config)
