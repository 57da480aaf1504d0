"""Reading the arguments of ``minddp.functional``: names, ranks and splits made exact, or a ValueError.

What always holds
    Nothing here communicates. :func:`checked` turns a bad argument into a :class:`~.agreement.Call` that
    tells the other ranks, so that all of them raise instead of one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..functions import group_of
from . import agreement, control, linear
from .agreement import Call, CollectiveError

OPS = ("sum", "avg", "product", "min", "max")
LOSSES = ("per_rank", "replicated")
_MOST_ROWS = 2**62  # what travels as an int64


def member(group: Any) -> Any:
    """The process group, the default one for None; raises where this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise CollectiveError("minddp.functional needs a process group: call torch.distributed.init_process_group")
    inside = group is not dist.GroupMember.NON_GROUP_MEMBER
    if inside:
        group = group_of(group, "minddp.functional", "group")
        inside = rank_in(group, "minddp.functional", "group", CollectiveError) >= 0
    if not inside:
        raise CollectiveError(
            f"rank {dist.get_rank()} (of the default group) is outside the group of this collective; "
            "only the members of a group may call it"
        )
    return group


def rank_in(group: Any, function: str, argument: str, error: type[Exception]) -> int:
    """This rank's number in ``group``, as torch's tables have it; raises ``error`` if they do not hold it."""
    try:
        return int(dist.get_rank(group))
    except (ValueError, TypeError):  # a class of the program's may have no hash, by which torch looks it up
        raise error(
            f"{function}: torch.distributed has no table of {argument}, a {type(group).__name__} of the program's "
            "own: pass one that torch.distributed.new_group() returns"
        ) from None


def checked(collective: str, build: Callable[[], Call]) -> Call:
    """``build()``, or a call that carries what is wrong with the arguments."""
    return checked_with(collective, lambda: (build(), None))[0]


def checked_with(collective: str, build: Callable[[], tuple[Call, Any]]) -> tuple[Call, Any]:
    """The same for a ``build`` that also returns what it made of the arguments."""
    try:
        return build()
    except Exception as error:  # of whatever type: an argument may raise its own where it is looked at
        # No use is made of the rest: a call with an error raises before anything runs.
        return Call(collective, error=f"{collective}: {error}"), None


def grad_mode(x: Tensor | None) -> int:
    if not torch.is_grad_enabled():
        return agreement.NO_GRAD
    return agreement.REQUIRED if x is not None and x.requires_grad else agreement.NOT_REQUIRED


def tensor(x: Any, group: Any, name: str = "x") -> Tensor:
    """``x``, if it is a dense tensor on a device that the group reaches."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, not {x.layout}; use {name}.to_dense()")
    if reason := linear.why_not_differentiated(x):
        raise TypeError(f"{name} {reason}")
    if not control.supports(group, x.device.type):
        raise ValueError(
            f"{name} is on {x.device}, which the group's backend {dist.get_backend(group)!r} cannot reach"
        )
    return x


def announceable(x: Any, group: Any) -> None:
    """Raises unless the other ranks can make a tensor like ``x`` (:meth:`~.agreement.Call.empty`)."""
    if tensor(x, group).is_quantized:
        raise TypeError(f"x, {x.dtype} on {x.device}, is of no kind that the other ranks can make a tensor of")


def has_rows(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise ValueError("a tensor with 0 dimensions has no rows to split; use x.reshape(1)")
    return x


def joined(x: Any, group: Any, splits: Sequence[int] | None, name: str = "splits") -> tuple[Tensor, tuple[int, ...]]:
    """The rows for all ranks as one tensor, and how many go to each; a list brings its own splits."""
    size = dist.get_world_size(group)
    if not isinstance(x, (list, tuple)):
        return x, row_splits(has_rows(tensor(x, group)), splits, size, name)
    if splits is not None:
        raise ValueError(f"{name}= goes with one tensor; a list brings its own")
    if len(x) != size:
        raise ValueError(f"a list needs one tensor for each of the {size} ranks, not {len(x)}")
    parts = [has_rows(tensor(part, group, f"x[{i}]")) for i, part in enumerate(x)]
    if len({(part.dtype, part.device, part.shape[1:]) for part in parts}) > 1:
        raise ValueError("the tensors of a list must share dtype, device and all dimensions but the first")
    return torch.cat(parts), tuple(part.shape[0] for part in parts)


def row_splits(x: Tensor, splits: Sequence[int] | None, size: int, name: str = "splits") -> tuple[int, ...]:
    """How many rows go to each rank: ``splits``, or equal shares."""
    rows = x.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows do not divide into {size} equal parts; pass {name}=")
        return (rows // size,) * size
    given = whole_numbers(splits, name)
    if len(given) != size or min(given) < 0 or sum(given) != rows:
        raise ValueError(f"{name}={list(given)} must be {size} counts that add up to the {rows} rows of x")
    return given


def whole_numbers(values: Any, name: str) -> tuple[int, ...]:
    """``values`` as Python's ints, whatever integers they are (NumPy's, a tensor's)."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise TypeError(f"{name}={values!r} must hold one whole number for each rank") from error


def output_counts(splits: Sequence[int] | None, group: Any) -> tuple[int, ...] | None:
    """``splits`` as ints; raises unless it is None or one count for each rank."""
    if splits is None:
        return None
    size, given = dist.get_world_size(group), whole_numbers(splits, "output_splits")
    if len(given) != size or min(given) < 0 or max(given) > _MOST_ROWS:
        raise ValueError(f"output_splits={list(given)} must be {size} counts")
    return given


def op_name(op: Any, dtype: torch.dtype) -> str:
    """``op`` in our words (also for a ``torch.distributed.ReduceOp``), if it exists for ``dtype``."""
    name = op if isinstance(op, str) else _torch_op_name(op)
    if name not in OPS:
        raise ValueError(f"op={op!r} is not one of {', '.join(map(repr, OPS))}")
    reason = _why_not(name, dtype)
    if reason:
        raise ValueError(f"op={name!r} of {dtype}: {reason}")
    return name


def _torch_op_name(op: Any) -> str:
    for name in OPS if isinstance(op, (dist.ReduceOp, type(dist.ReduceOp.SUM))) else ():
        if op == getattr(dist.ReduceOp, name.upper()):
            return name
    return ""


def _why_not(op: str, dtype: torch.dtype) -> str:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return "8-bit floats are not added; convert to float16 or wider"
    if dtype is torch.bool and op in ("sum", "avg"):
        return 'bools are not added; use "max" for any, "min" for all, or convert to integers'
    if not (dtype.is_floating_point or dtype.is_complex) and op == "avg":
        return "an average of integers is not one; convert to a floating dtype"
    if dtype.is_complex and op in ("min", "max"):
        return "complex numbers have no order"
    return ""


def loss_name(loss: Any) -> str:
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(map(repr, LOSSES))}")
    return str(loss)


def root_rank(rank: int | None, global_rank: int | None, group: Any, name: str) -> int:
    """The root as a rank of the group; ``global_rank`` is one of the default group. Neither means 0."""
    size = dist.get_world_size(group)
    if global_rank is not None:
        if rank is not None:
            raise ValueError(f"pass {name}= (a rank in the group) or global_{name}=, not both")
        members = dist.get_process_group_ranks(group)
        if global_rank not in members:
            raise ValueError(f"global_{name}={global_rank} is outside the group, whose global ranks are {members}")
        return members.index(global_rank)
    try:
        root = operator.index(0 if rank is None else rank)
    except TypeError:
        root = -1
    if not 0 <= root < size:
        raise ValueError(f"{name}={rank!r} is outside the group, whose ranks are 0 to {size - 1}")
    return root
