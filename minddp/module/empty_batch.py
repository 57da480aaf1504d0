"""Training on nothing: how a rank that ran out of data keeps layers going that communicate in forward.

Overview
    A SyncBatchNorm waits, in forward and in backward, for every rank of its group. Inside
    ``DistributedDataParallel.join()`` a rank without data must therefore call the same layers in the same
    order as the others, between the same buckets. It does the obvious: it runs the model, forward and
    backward, on a batch of no samples. Every collective comes where it must because the same code calls
    it, and everything contributed is zero: counts, statistics, gradients, and the batch's weight.

What always holds
    The batch is the rank's last one with every tensor cut to zero rows. A rank that never had one takes the
    description of another rank's, which is published in the process group's store at a rank's first
    forward inside join(). The joined rank's gradients stay what they were; its running statistics follow
    the others'.

A module takes part if it is a SyncBatchNorm (minddp's or torch's) or sets ``communicates_in_forward = True``.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .find_tensors import find_tensors

__all__ = ["EmptyBatch", "communicates_in_forward"]

# Every rank of a group enters the same join() contexts on it, so counting them gives ranks the same key.
_contexts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_WAIT = timedelta(seconds=60)


def communicates_in_forward(module: nn.Module) -> bool:
    """Whether a layer in ``module`` calls collectives of its own in training."""
    return any(
        getattr(layer, "communicates_in_forward", False) or isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    )


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _load(data: bytes, place: Callable[[Any, str], Any]) -> Any:
    """Tensors and plain containers; nothing that another rank has sent is executed.

    Raises:
        pickle.UnpicklingError: something else.
    """
    return torch.load(io.BytesIO(data), map_location=place, weights_only=True)


def _without_rows(value: Any) -> Any:
    """Of a leaf of ``tree_map``, which does not look into dataclasses, nor into mappings like transformers'."""
    if is_dataclass(value) and not isinstance(value, type):
        cut: Any = copy.copy(value)
        for field in fields(value):  # of frozen ones, too
            object.__setattr__(cut, field.name, tree_map(_without_rows, getattr(value, field.name)))
        return cut
    if isinstance(value, MutableMapping):
        cut = copy.copy(value)
        for key in value:
            cut[key] = tree_map(_without_rows, value[key])
        return cut
    if not isinstance(value, Tensor):
        return value
    empty = value.new_zeros((0, *value.shape[1:]) if value.dim() else ())
    return empty.requires_grad_(value.requires_grad)


class EmptyBatch:
    """What join() needs of one wrapper: remembers its inputs' shapes, and trains on none of their rows."""

    def __init__(self, ddp: Any):
        self._ddp = ddp
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        group = ddp.process_group
        _contexts[group] = _contexts.get(group, 0) + 1
        self._key = f"minddp/join/{group.group_name}/{_contexts[group]}"
        this = weakref.ref(self)

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = this()
            if batch is not None and ddp._join_config.enable:
                batch._remember(args, kwargs)

        # Gone with this object at the latest: a join() that is left by an exception calls nobody.
        handle = ddp.module.register_forward_pre_hook(remember, with_kwargs=True)
        self.close = weakref.finalize(self, handle.remove)

    def _remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self._inputs is None
        self._inputs = tree_map(_without_rows, (args, kwargs))
        if first:
            self._publish()

    def _publish(self) -> None:
        try:
            data = _saved(self._inputs)
            _load(data, lambda storage, _: storage)
        except pickle.UnpicklingError:
            data = _saved("they are more than tensors and plain containers")
        except Exception as error:  # whatever an input's own pickling may raise; it matters only if read
            data = _saved(f"{type(error).__name__}: {error}")
        store = dist.distributed_c10d._get_default_store()
        store.set(self._key, data)  # type: ignore[arg-type]  # the stub forgets bytes

    def _taken_over(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Another rank's inputs, on this rank's device where they are on that rank's."""
        store = dist.distributed_c10d._get_default_store()
        store.wait([self._key], _WAIT)
        device = self._ddp.device

        def place(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else storage.to(device=device)

        found = _load(store.get(self._key), place)
        if isinstance(found, str):
            raise RuntimeError(
                "join(): this rank never had a batch, and the inputs of another rank, from which it would make "
                f"an empty one for the model's SyncBatchNorm layers, cannot be passed on ({found}). "
                "Give every rank at least one batch."
            )
        return found

    def forward_backward(self, synchronizes: bool) -> None:
        """One forward and backward on no rows, beside the other ranks' own. Collective."""
        ddp = self._ddp
        if self._inputs is None:
            self._inputs = self._taken_over()
        parameters = list(ddp.module.parameters())
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if ddp._minddp_config.reduction == "weighted":
            ddp._minddp_weights("add_weight").add(0.0)
        with nullcontext() if synchronizes else ddp.no_sync():
            self._run(*self._inputs)
            if synchronizes and ddp.require_manual_backward_finalization:
                ddp.finalize_backward()
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient

    @torch.enable_grad()
    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ddp = self._ddp
        inputs, kwargs = ddp._minddp_move_inputs(inputs, kwargs)
        ddp.reducer.begin_forward()
        try:
            output = ddp._post_forward(ddp._run_ddp_forward(*inputs, **kwargs))
        except Exception as error:
            raise RuntimeError(
                "join(): this rank is out of data and runs the model on an empty batch, as its SyncBatchNorm layers "
                "need the statistics of all ranks; the model raised. Let it accept inputs whose first dimension "
                "is 0, or give all ranks the same number of batches."
            ) from error
        roots = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        # Zeros, so that an output which does not shrink with the batch (a penalty on weights) adds nothing.
        torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
