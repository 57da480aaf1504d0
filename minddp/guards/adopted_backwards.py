"""Backwards that went past the wrapper while one of its forwards waited for its backward: likely a mistake.

As with torch's class, such a backward counts as that forward's, and its gradients are averaged. Where the other ranks
have no such backward, they wait for each other, or add up gradients of different things.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch
from torch.autograd.function import BackwardCFunction

from ..logs import log
from ..reducer import Reducer

_TEXT = (
    "DistributedDataParallel around %s: a backward on rank %d went past it, with gradients of %s, while a ddp(...) "
    "waited for its backward. As with torch's class it counts as that one's, and its gradients are averaged. Where "
    "another rank has no such backward, ranks wait for each other, or add up gradients of different things. Call "
    "ddp(...) instead of ddp.module(...); and run a forward that no backward follows under torch.no_grad() or "
    "ddp.no_sync(). This is logged once."
)


def warn(module: torch.nn.Module, reducer: Reducer, parameters: Sequence[int]) -> bool:
    """Inside of such a backward: logs it. ``parameters``: the indices of those that its graph leads to. Returns
    whether it is one."""
    if _is_within_a_node():
        return False
    names = ", ".join(f"'{reducer.names[index]}'" for index in parameters[:3])
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    log.warning(_TEXT, type(module).__name__, reducer.group.rank(), names + more)
    return True


def _is_within_a_node() -> bool:
    """Whether a node of another backward has called this one. A reentrant checkpoint's does, whose graph is the
    wrapper's own and has no node of the forward's."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None
