"""How each collective of this room is called: out of torch.compile's sight, and only once all ranks agree."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .. import environment
from . import agreement, arguments
from .agreement import Call, CollectiveError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def eager(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps torch.compile out of ``fn``: agreeing with other ranks is no part of a graph.

    ``torch.compiler.disable`` does that, but imports the compiler (seconds) into programs that use none. So
    it is called when the compiler is there; the attribute is what it leaves on a function for the compiler.
    """
    disabled: list[Callable[_P, _R]] = []
    reason = "minddp.functional talks to other ranks before it computes"

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(fn, reason=reason))
            return disabled[0](*args, **kwargs)
        except TypeError as error:
            _tell_misuse(fn, error, args, kwargs)
            raise

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call


def _tell_misuse(fn: Callable[..., Any], error: TypeError, args: Any, kwargs: Any) -> None:
    """Where ``error`` says that ``fn`` has no such arguments, which ran nothing: the other ranks wait to hear it."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        if dist.is_initialized() and environment.check_collectives():
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            with contextlib.suppress(CollectiveError):
                settle(Call(fn.__name__, error=str(error)), arguments.member(groups[0] if groups else None))


def settle(call: Call, group: Any, learns: bool = False) -> tuple[bool, list[Call]]:
    """Whether gradients are needed on any rank, and everybody's call (none if checks are off and nothing is to be
    learned from them)."""
    if learns or environment.check_collectives():
        return agreement.agree(call, group)
    if call.error:
        raise CollectiveError(call.error)
    return call.grad == agreement.REQUIRED, []
