"""What a reducer is made from. csrc/reducer/reducer.h is the place to read about the reducer itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from .config import Config
from .parameters import plainly


class Stage(IntEnum):
    """When the C++ reducer asks a case, in comparison with others; within a stage, in the order of observers."""

    MEMORY = 0  # changes what every bucket is made with
    KINDS = 1  # makes buckets of other kinds, or reduces them in another way
    GRADIENTS = 2  # looks at gradients, and where they lie
    REST = 3


@dataclass
class Plan:
    """What a reducer is made from. Observers may change it (:meth:`minddp.events.Observer.planning`).

    Attributes:
        parameters: leaf tensors that require gradients; none, if companions average them all.
        device: where the module is.
        names: their names, for messages.
        sparse: which of them get sparse gradients.
        group: the process group.
        config: the wrapper's arguments.
        always_reduce: go through the process group if it has one rank, too.
        reduce_dtype: the dtype in which floating-point gradients travel; None: their own.
        dtypes: what travels, by parameter; None: as ``reduce_dtype`` says.
        buckets: the first, and no others follow by themselves; None: the core chooses.
        cases: what companions attach to the C++ reducer (csrc/reducer/events.h); see :meth:`add`.
    """

    parameters: list[torch.Tensor]
    names: list[str]
    sparse: list[bool]
    device: torch.device
    group: dist.ProcessGroup
    config: Config
    always_reduce: bool = False
    reduce_dtype: torch.dtype | None = None
    dtypes: list[torch.dtype] | None = None
    buckets: list[list[int]] | None = None
    cases: list[tuple[Stage, Any]] = field(default_factory=list)

    def add(self, case: Any, stage: Stage = Stage.REST) -> None:
        """Attaches ``case``, a ``_C.Case`` of a companion's, to the reducer that will be made."""
        self.cases.append((stage, case))

    def plain_dtypes(self) -> list[torch.dtype]:
        """What travels, by parameter, if every gradient is sent whole."""
        with plainly():
            return [
                p.dtype if self.reduce_dtype is None or sparse or not p.is_floating_point() else self.reduce_dtype
                for p, sparse in zip(self.parameters, self.sparse)
            ]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, for C++ to call: its object is not kept alive, since what C++ holds is hidden from Python's
    garbage collection, and a cycle through it would never go away."""
    itself = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = itself()
        assert alive is not None, "called after its owner's end"
        return alive(*args)

    return call
