"""The constructor's arguments that companions add, as type checkers and editors see them.

At run time each companion's observer says which arguments it has (``Observer.options`` in ``events.py``), checks them
and describes them. A type checker reads no observers, so their names and types stand here once more. A test holds the
two equal. The arguments of a companion of your own are unknown to a type checker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import os

    import torch

    from .planner import BucketPlan
    from .wire import Wire

__all__ = ["Options"]


class Options(TypedDict, total=False):
    reduction: Literal["mean", "sum", "weighted"]
    reduce_dtype: torch.dtype | None
    wire: Literal["bf16", "fp16", "int8"] | Wire | None
    ordered: bool
    check_finite: bool | Literal["raise", "warn", "skip"]
    check_replicas_every: int | None
    bucket_plan: BucketPlan | str | os.PathLike[str] | None
