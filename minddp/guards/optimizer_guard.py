"""Before any ``optimizer.step()`` uses gradients, the wrappers whose parameters it would change are asked.

A closure makes the gradients inside of ``step()``: then they are asked after each of its calls.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Guarded(Protocol):
    """A wrapper; ``refuses_step`` is asked first, and costs little."""

    def may_refuse_step(self) -> bool: ...
    def shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool: ...
    def check_step(self, optimizer: torch.optim.Optimizer, others: list[Any]) -> None: ...


_live: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def watch(wrapper: Guarded) -> None:
    """From now on, until it is gone."""
    with _lock:
        _live.add(wrapper)


def live() -> list[Any]:
    """All wrappers that are watched."""
    with _lock:
        return list(_live)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _check(optimizer)
        return None

    def then_checked() -> Any:
        loss = closure()
        _check(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_checked}
    return (args[0], then_checked, *args[2:]), kwargs


def _check(optimizer: torch.optim.Optimizer) -> None:
    wrappers = live()
    for wrapper in wrappers:
        if wrapper.may_refuse_step() and wrapper.shares_parameters(optimizer):
            wrapper.check_step(optimizer, [other for other in wrappers if other is not wrapper])


register_optimizer_step_pre_hook(_before_step)
