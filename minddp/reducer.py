"""The reducer with its planning: which buckets, when they are cut anew, how sums become means.

The work during backward is done by the C++ class (csrc/reducer/reducer.h is the place to read about it). This one
decides, between iterations, what that class is to do.
"""

from __future__ import annotations

import math
import secrets
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from .buckets import (
    Agreed,
    Buckets,
    agree_on_order,
    assign_buckets,
    check_buckets,
    ready_order,
    torchs_buckets,
    unordered_buckets,
)
from .config import FIRST_BUCKET_BYTES, Config
from .lifetime import outlive, outlive_callbacks
from .messages import SHADOWED, wait_for_future
from .parameters import plainly

ScaleRule = Callable[[int, int, bool], tuple[float, float]]


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
        wire_nbytes: bytes that a gradient takes on the wire, by parameter; None: as ``dtypes`` say.
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
    wire_nbytes: list[int] | None = None
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


class Reducer(_C.Reducer):
    """Averages gradients over ranks during backward, as ``plan`` says.

    Args:
        plan: what is reduced, and how.
        after_last_launch: called on autograd's threads, once all buckets of a backward have left.
    """

    def __init__(self, plan: Plan, after_last_launch: Sequence[Callable[[], None]] = ()):
        self.config, self.group, self.names = plan.config, plan.group, plan.names
        self.device, self._sparse = plan.device, plan.sparse
        plain = plan.plain_dtypes()
        dtypes = plain if plan.dtypes is None else plan.dtypes
        with plainly():
            # Caps count bytes as if every gradient were sent whole: fewer bytes make no fewer buckets.
            self.nbytes = [p.numel() * dtype.itemsize for p, dtype in zip(plan.parameters, plain)]
            self.kinds: list[Hashable] = [
                (p.dtype, p.device, name if sparse else "", dtype)
                for p, name, sparse, dtype in zip(plan.parameters, plan.names, plan.sparse, dtypes)
            ]
        self.wire_nbytes = self.nbytes if plan.wire_nbytes is None else plan.wire_nbytes
        # With find_unused_parameters, buckets are torch's, and are never cut anew. A bucket whose parameters this
        # rank does not use is complete here before a collective of the program's own in backward (SyncBatchNorm's),
        # and after it on a rank that uses them: torch's buckets leave where they do with torch's class. And new
        # buckets are a collective in forward. Torch's class has none there, so a rank may run a forward alone.
        self._as_torch = self.config.graph_mode == _C.GraphMode.FIND_UNUSED
        self.is_settled = self._as_torch
        self.order_of_arrival: list[int] = []  # by which buckets were cut anew
        self.agreed_token = ""  # with new buckets: the same on all ranks, and no other reducer's
        self._has_hook, self._divisor = False, self.group.size()
        self._sends = after_last_launch
        self.on_cut: Callable[[], None] = lambda: None  # called when gradients travel in other buckets
        self._rule: ScaleRule = _mean
        options = _C.ReducerOptions(
            graph_mode=self.config.graph_mode, wire_dtypes=dtypes, always_reduce=plan.always_reduce
        )
        super().__init__(plan.parameters, self.names, self.group, options)
        self._program = None if self._as_torch else _C.ProgramCollectives()
        self._callbacks = _C.Callbacks()
        added = [case for _, case in sorted(plan.cases, key=lambda staged: staged[0])]
        self._cases = [case for case in (self._program, *added, self._callbacks) if case is not None]
        for case in self._cases:
            self.add(case)
        super().set_buckets(self._first_buckets())
        self.set_skip_all_reduce_unused(self.config.skip_all_reduce_unused_params)
        outlive(self, self.group)
        self.set_callbacks(after_last_launch=weakly(self._after_last_launch))
        self._set_scales()

    def __getattr__(self, name: str) -> Any:
        """What a companion's case offers may be asked of its reducer, such as the timeline's ``last_step()``."""
        for case in self.__dict__.get("_cases", ()):
            if hasattr(case, name):
                self.__dict__[name] = found = getattr(case, name)
                return found
        raise AttributeError(
            f"the reducer has no {name!r}, and no companion that is attached to it either. Are MINDDP_PLAIN or "
            "MINDDP_WITHOUT set?"
        )

    def set_callbacks(self, **callbacks: Callable[..., Any]) -> None:
        """See ``Callbacks`` in csrc/bindings.cpp. Held by the reducer."""
        self._callbacks.set(**callbacks)

    # --- buckets ---

    def _first_buckets(self) -> Buckets:
        """As torch's class: all of a kind together, where the order will be known soon.

        Not where it is more than 25 MiB. With gradient views a large gradient alone in its bucket takes no further
        memory, and one that shares a bucket does.
        """
        config = self.config
        if self._as_torch or config.lists_caps:
            return unordered_buckets(self.nbytes, self.kinds, config.torch_caps)
        if sum(self.nbytes) <= max(FIRST_BUCKET_BYTES, config.torch_caps[0]):
            return unordered_buckets(self.nbytes, self.kinds, [sys.maxsize])
        return self._assign(range(len(self.nbytes))[::-1], [])

    def _assign(self, arrived: Sequence[int], absent: Sequence[int]) -> Buckets:
        # What never arrived would hold up what did, so the two do not share buckets.
        config = self.config
        alone = config.alone_from(self.device.type) or math.inf
        caps = config.caps_for(sum(self.nbytes))
        kinds: list[Hashable] = [
            (kind, i) if nbytes >= alone else kind for i, (kind, nbytes) in enumerate(zip(self.kinds, self.nbytes))
        ]
        return [
            bucket
            for order in (arrived, absent)
            for bucket in assign_buckets(self.nbytes, kinds, order, caps, config.last_cap)
        ]

    def _assign_as_torch(self, arrived: Sequence[int], absent: Sequence[int]) -> Buckets:
        full = sys.maxsize
        sizes = [full if sparse else nbytes for sparse, nbytes in zip(self._sparse, self.nbytes)]
        return torchs_buckets(sizes, self.kinds, [*arrived, *sorted(absent)], self.config.torch_caps)

    def _rebuild_buckets(self, collective: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Once, after the first iteration: buckets along rank 0's order. Collective.

        With a static graph after the second one, as in torch: until then a rank may run a forward alone. With
        unused parameters to find, never.

        ``collective``: a context in which the ranks meet, if they do.
        """
        static = self.config.graph_mode == _C.GraphMode.STATIC
        if self.is_settled or self.ended() < 1 + static or self.phase() != _C.Phase.IDLE:
            return False
        self.is_settled = True
        arrived, absent = ready_order(self.arrival_order())
        self.order_of_arrival = arrived + absent
        # A communication hook's numbers may depend on what travels together; and collectives of the program's own in
        # backward meet other ranks' buckets, if gradients come in another order there.
        as_torch = self._has_hook or (self._program is not None and self._program.found())
        agreed = Agreed(arrived, absent, as_torch=as_torch, token=secrets.randbits(62))
        with collective():
            agreed = agree_on_order(agreed, self.group, self.device)
        self.agreed_token = f"{agreed.token:x}"
        assign = self._assign_as_torch if agreed.as_torch else self._assign
        self._cut(assign(agreed.arrived, agreed.absent))
        return True

    def buckets_to_come(self) -> Buckets:
        """Those of now; or, before they are cut along the order of arrival, as if the last gradient came first."""
        if self.is_settled:
            return self.buckets()
        assign = self._assign_as_torch if self.is_as_torch else self._assign
        return assign(range(len(self.nbytes))[::-1], [])

    @property
    def is_as_torch(self) -> bool:
        """Buckets are cut as torch's class cuts them."""
        return self._as_torch or self._has_hook

    def set_buckets(self, buckets: Buckets) -> None:
        """Re-plans; the caller makes all ranks do the same between the same iterations.

        Raises:
            ValueError: a parameter is missing or repeated, or a bucket mixes dtypes or devices.
            RuntimeError: a backward is not finished.
        """
        check_buckets(buckets, self.names, self.kinds)
        self._cut(buckets)
        self.is_settled = True

    def _cut(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        self.on_cut()

    def detach(self) -> None:
        """Lets go of the parameters: another reducer takes them, or none."""
        self.remove_hooks()
        self.abort_iteration()

    def _after_last_launch(self) -> None:
        for send in self._sends:
            send()

    # --- scales ---

    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket)`` reduces. Held weakly: the caller keeps it."""
        super().set_comm_hook(state, hook)
        outlive_callbacks(self, self.group)

    def averages_itself(self) -> None:
        """From now on the communication hook averages: it gets gradients as they are, and its result is scaled."""
        self._has_hook = True
        self._set_scales()

    @property
    def divisor(self) -> int:
        """How many ranks a mean is of."""
        return self._divisor

    def set_divisor(self, divisor: int) -> None:
        """How many ranks a mean divides by: those that still have data, under ``join``."""
        if divisor != self._divisor:
            self._divisor = divisor
            self._set_scales()

    def set_scale_rule(self, rule: ScaleRule) -> None:
        """``rule(divisor, ranks, hooked)`` gives the factors of gradients while packing and while unpacking.

        ``divisor``: ranks, or those that still have data (join). ``hooked``: a communication hook averages by itself.
        """
        self._rule = rule
        self._set_scales()

    def _set_scales(self) -> None:
        self.set_scales(*self._rule(self._divisor, self.group.size(), self._has_hook))

    # --- a rank that ran out of data ---

    def shadow_backward(self) -> None:
        """All of a synchronized backward's collectives, with zeros. Collective."""
        if not self.names:
            return
        futures = [self.run_hook(bucket) for bucket in self._get_zeros_like_grad_buckets()]
        used_map = self.shadow_used_map()
        self._after_last_launch()
        for future in futures if used_map is None else [*futures, used_map]:
            wait_for_future(future, self.group, SHADOWED)


def _mean(divisor: int, ranks: int, hooked: bool) -> tuple[float, float]:
    return (1.0 if hooked else 1.0 / divisor), 1.0


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, for C++ to call: its object is not kept alive, since what C++ holds is hidden from Python's
    garbage collection, and a cycle through it would never go away."""
    itself = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = itself()
        assert alive is not None, "called after its owner's end"
        return alive(*args)

    return call
