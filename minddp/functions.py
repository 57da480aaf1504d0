"""What a program may ask of a wrapper between two iterations: to give one up, to free memory, to follow changes."""

from __future__ import annotations

import torch

from ._functions import averager_of, wrapper_of

__all__ = ["abort_iteration", "refresh", "release_buckets"]


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
