"""What averages one wrapper's gradients: which buckets, when they are cut anew, how sums become means; and the one
place where its reducer is made and remade.

The work during backward is the C++ reducer's (csrc/reducer/reducer.h). The averager decides, between iterations, what
that is to do.

What always holds: at most one of the wrapper's reducers has hooks on its parameters, and every observer knows that
one. Whoever changes what a reducer is made from ends in :meth:`Averager.rebuild`. That runs between iterations, on
the thread that calls forward.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _C, environment
from .buckets import (
    Agreed,
    Buckets,
    agree_on_order,
    assign_buckets,
    check_buckets,
    ready_order,
    split_by_kind,
    torchs_buckets,
    unordered_buckets,
)
from .config import FIRST_BUCKET_BYTES, Config
from .events import Observers
from .hooks import builtin_dtype, name_of, waits_in_callbacks
from .lifetime import outlive, outlive_callbacks
from .messages import SHADOWED, is_torchs, wait_for_future
from .parameters import Parameters, plainly
from .reducer import Plan, weakly

Result = TypeVar("Result")
ScaleRule = Callable[[int, int, bool], tuple[float, float]]

# In the order in which they were made, which is the same on all ranks.
_alive: weakref.WeakValueDictionary[int, Averager] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def averagers() -> list[Averager]:
    """Those of all wrappers of this process, oldest first."""
    with _lock:
        return list(_alive.values())


class Averager:
    """Averages the gradients of one wrapper's parameters.

    Args:
        module: the wrapped module.
        config: the constructor's arguments.
        parameters: what is reduced.
        group: the process group.
        observers: the wrapper's.

    Attributes:
        reducer: made by :meth:`rebuild`.
        nbytes, kinds: of each gradient: its bytes, as caps count them, and what may not share a bucket.
        divisor: how many ranks a mean is of: those that still have data, under ``join``.
        hook: ``(state, hook)`` as registered, or ``(None, builtin type)``; None: the reducer's own all-reduce.
        has_foreign_group: the group is the program's own (:func:`minddp.messages.is_torchs`).
        is_settled: buckets are not cut anew along the order of arrival any more.
        has_rebuilt_buckets: they have been.
        order_of_arrival: by which they were.
        is_joining: the last synchronized forward ran inside of ``join()``.
        watch: called while a collective of backward does not end: see :meth:`watch_waits`.
    """

    reducer: _C.Reducer

    def __init__(
        self,
        module: torch.nn.Module,
        config: Config,
        parameters: Parameters,
        group: dist.ProcessGroup,
        observers: Observers,
    ):
        self.module, self.config, self.parameters, self.group = module, config, parameters, group
        self.observers = observers
        self.hook: tuple[Any, Any] | None = None
        self.watch: Callable[[float, int, str], None] | None = None
        self.is_joining = False
        observers.of_averager(self)
        self.rebuild()
        with _lock:
            _alive[next(_numbers)] = self

    def __del__(self) -> None:
        """A collective that was given up may keep the reducer alive. Its hooks are removed: they must not run beside
        the next wrapper's."""
        if "reducer" in self.__dict__ and not sys.is_finalizing():
            _detach(self.reducer)

    # --- making ---

    def rebuild(self, config: Config | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Detaches the reducer there is and makes one for what holds now. REQUIRES: no backward is running."""
        before = self.__dict__.get("reducer")
        if before is not None:
            _detach(before)
        self.config, self.group = config or self.config, group or self.group
        self.has_foreign_group = not is_torchs(self.group)
        plan = Plan(
            list(self.parameters.reduced),
            list(self.parameters.names),
            self.parameters.expect_sparse(),
            self.parameters.device,
            self.group,
            self.config,
            always_reduce=self.has_foreign_group or environment.always_reduce(),
            reduce_dtype=None if self.hook is None else builtin_dtype(self.hook[1]),
        )
        for call in self.observers.planning:
            call(plan)
        self._make(plan)
        if before is not None:
            self.reducer.take_over(before)
        for call in self.observers.reducer_made:
            call(self.reducer, before)
        self._place_hook()

    def _make(self, plan: Plan) -> None:
        plain = plan.plain_dtypes()
        dtypes = plain if plan.dtypes is None else plan.dtypes
        with plainly():
            # Caps count bytes as if every gradient were sent whole: fewer bytes make no fewer buckets.
            self.nbytes = [p.numel() * dtype.itemsize for p, dtype in zip(plan.parameters, plain)]
            self.kinds: list[Hashable] = [
                (p.dtype, p.device, name if sparse else "", dtype)
                for p, name, sparse, dtype in zip(plan.parameters, plan.names, plan.sparse, dtypes)
            ]
        self._sparse = plan.sparse
        # With find_unused_parameters, buckets are torch's, and are never cut anew. A bucket whose parameters this
        # rank does not use is complete here before a collective of the program's own in backward (SyncBatchNorm's),
        # and after it on a rank that uses them: torch's buckets leave where they do with torch's class. And new
        # buckets are a collective in forward. Torch's class has none there, so a rank may run a forward alone.
        self.is_settled = self._finds_unused
        self.has_rebuilt_buckets = False
        self.order_of_arrival: list[int] = []
        self.divisor = self.group.size()
        self._rule: ScaleRule = _mean
        self.reducer = _C.Reducer(
            plan.parameters, plan.names, self.group, self.config.graph_mode, dtypes, plan.always_reduce
        )
        self._program, self.stamps, callbacks = _C.ProgramCollectives(), _C.Stamps(), _C.Callbacks()
        # Kept: C++ keeps of a case no more than its C++ half.
        self._cases = [case for _, case in sorted(plan.cases, key=lambda staged: staged[0])]
        noted = [] if self._finds_unused else [self._program]
        for case in (*noted, *self._cases, self.stamps, callbacks):
            self.reducer.add(case)
        self.reducer.set_buckets(self._first_buckets(plan))
        self.reducer.set_skip_all_reduce_unused(self.config.skip_all_reduce_unused_params)
        outlive(self.reducer, self.group)
        if self.observers.after_last_launch:
            callbacks.set_callbacks(after_last_launch=weakly(self._after_last_launch))

    def _after_last_launch(self) -> None:
        for call in self.observers.after_last_launch:
            call()

    def watch_waits(self, watch: Callable[[float, int, str], None]) -> None:
        """``watch(seconds, bucket, error)`` is called once a second while the collective of ``bucket`` does not end,
        and when it has failed with ``error``. May raise. Held by the caller."""
        self.watch = weakly(watch)
        self.reducer.set_callbacks(on_stall=self.watch)

    # --- buckets ---

    @property
    def _finds_unused(self) -> bool:
        return self.config.graph_mode == _C.GraphMode.FIND_UNUSED

    @property
    def is_as_torch(self) -> bool:
        """Buckets are cut as torch's class cuts them."""
        return self._finds_unused or self.has_own_hook

    def _first_buckets(self, plan: Plan) -> Buckets:
        """The plan's; otherwise as torch's class: all of a kind together, where the order will be known soon.

        Not where it is more than 25 MiB. With gradient views a large gradient alone in its bucket takes no further
        memory, and one that shares a bucket does.
        """
        if plan.buckets is not None:  # what was planned as one kind may travel as several
            buckets = plan.buckets if plan.dtypes is None else split_by_kind(plan.buckets, self.kinds)
            check_buckets(buckets, plan.names, self.kinds)
            self.is_settled = True
            return buckets
        config = self.config
        if self._finds_unused or config.lists_caps:
            return unordered_buckets(self.nbytes, self.kinds, config.torch_caps)
        if sum(self.nbytes) <= max(FIRST_BUCKET_BYTES, config.torch_caps[0]):
            return unordered_buckets(self.nbytes, self.kinds, [sys.maxsize])
        return self._assign(range(len(self.nbytes))[::-1], [])

    def _assign(self, arrived: Sequence[int], absent: Sequence[int]) -> Buckets:
        # What never arrived would hold up what did, so the two do not share buckets.
        config = self.config
        alone = config.alone_from(self.parameters.device_type) or math.inf
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
        sizes = [sys.maxsize if sparse else nbytes for sparse, nbytes in zip(self._sparse, self.nbytes)]
        return torchs_buckets(sizes, self.kinds, [*arrived, *sorted(absent)], self.config.torch_caps)

    def rebuild_buckets(self) -> None:
        """Once, after the first iteration: buckets along rank 0's order of arrival. Collective.

        With a static graph after the second one, as in torch: until then a rank may run a forward alone. With
        unused parameters to find, never.
        """
        static = self.config.graph_mode == _C.GraphMode.STATIC
        if self.is_settled or self.reducer.ended() < 1 + static or self.is_under_way():
            return
        self.is_settled = True
        arrived, absent = ready_order(self.reducer.arrival_order())
        self.order_of_arrival = arrived + absent
        # A communication hook's numbers may depend on what travels together; and collectives of the program's own in
        # backward meet other ranks' buckets, if gradients come in another order there.
        as_torch = self.has_own_hook or self._program.found()
        agreed = Agreed(arrived, absent, as_torch=as_torch, token=secrets.randbits(62))
        with self.observers.together():
            agreed = agree_on_order(agreed, self.group, self.parameters.device)
        assign = self._assign_as_torch if agreed.as_torch else self._assign
        self.has_rebuilt_buckets = True
        self._cut(assign(agreed.arrived, agreed.absent))
        for call in self.observers.named:
            call(f"{agreed.token:x}")  # the same on all ranks, and no other reducer's

    def buckets_to_come(self) -> Buckets:
        """Those of now; or, before they are cut along the order of arrival, as if the last gradient came first."""
        if self.is_settled:
            return self.reducer.buckets()
        assign = self._assign_as_torch if self.is_as_torch else self._assign
        return assign(range(len(self.nbytes))[::-1], [])

    def set_buckets(self, buckets: Buckets) -> None:
        """Re-plans; the caller makes all ranks do the same between the same iterations.

        Raises:
            ValueError: a parameter is missing or repeated, or a bucket mixes dtypes or devices.
            RuntimeError: a backward is not finished.
        """
        check_buckets(buckets, self.parameters.names, self.kinds)
        self._cut(buckets)
        self.is_settled = True

    def _cut(self, buckets: Buckets) -> None:
        self.reducer.set_buckets(buckets)
        for call in self.observers.buckets_changed:
            call(self.reducer)

    # --- scales ---

    def set_divisor(self, divisor: int) -> None:
        if divisor != self.divisor:
            self.divisor = divisor
            self._set_scales()

    def set_scale_rule(self, rule: ScaleRule) -> None:
        """``rule(divisor, ranks, hooked)`` gives the factors of gradients while packing and while unpacking.

        ``divisor``: ranks, or those that still have data (join). ``hooked``: a communication hook averages by itself.
        For one reducer: to be called when it has been made.
        """
        self._rule = rule

    def _set_scales(self) -> None:
        self.reducer.set_scales(*self._rule(self.divisor, self.group.size(), self.has_own_hook))

    # --- the communication hook ---

    @property
    def has_builtin_hook(self) -> bool:
        return self.hook is not None and isinstance(self.hook[1], dist.BuiltinCommHookType)

    @property
    def has_own_hook(self) -> bool:
        """A hook of the program's averages: it gets gradients as they are, and its result is scaled."""
        return self.hook is not None and not self.has_builtin_hook

    def set_hook(self, state: object, hook: Any) -> None:
        """Uses ``hook`` from now on. A builtin hook is a dtype on the wire: the reducer is made anew with it."""
        self.hook = (state, hook)
        if self.has_builtin_hook:
            self.rebuild()
        else:
            self._place_hook()

    def _place_hook(self) -> None:
        if self.hook is not None:
            for call in self.observers.hook_changed:
                call(name_of(self.hook[1]))
        if self.has_own_hook or self.observers.bucket_packed:
            # C++ knows only this one; what users register stays where Python's garbage collector sees it.
            self.reducer.set_comm_hook(None, weakly(self._reduce))
            outlive_callbacks(self.reducer, self.group)
        self._set_scales()

    def _reduce(self, _: object, bucket: Any) -> Any:
        for call in self.observers.bucket_packed:
            call(bucket)
        if self.hook is None or self.has_builtin_hook:
            return self.reducer._run_allreduce_hook(bucket)
        state, hook = self.hook
        try:
            future = hook(state, bucket)
        except Exception as error:
            self.failed(error, "backward")
            raise
        if self.parameters.device.type == "cpu" and waits_in_callbacks(state):
            watch, index = self.watch, bucket.index()
            _C.wait_for_future(future, watch and (lambda waited, error: watch(waited, index, error)))
        return future

    # --- iterations ---

    def before_forward(self, joining: bool) -> None:
        """A forward with gradients begins. ``joining``: ranks may have run out of data."""
        for call in self.observers.entering:
            call()
        self.check_finished()
        if not self.reducer.sync_enabled:
            return
        self.is_joining = joining
        if self.has_foreign_group:
            self.set_divisor(self.group.size())
        if self.config.skip_all_reduce_unused_params:  # a joined rank sends all buckets: it knows nobody's flags
            self.reducer.set_skip_all_reduce_unused(not joining)
        for call in self.observers.before_forward:
            call(joining)

    def abort_iteration(self) -> None:
        """Gives up the iteration that is under way: back to the state between two."""
        for call in self.observers.aborting:
            call()
        self.reducer.abort_iteration()

    def shadow_backward(self) -> None:
        """A rank without data takes part in the others' backward, with zeros. Collective."""
        if not self.parameters.names:
            return
        futures = [self.reducer.run_hook(bucket) for bucket in self.reducer._get_zeros_like_grad_buckets()]
        used_map = self.reducer.shadow_used_map()
        self._after_last_launch()
        for future in futures if used_map is None else [*futures, used_map]:
            wait_for_future(future, self.group, SHADOWED)

    # --- refusing ---

    def is_under_way(self) -> bool:
        """An iteration has begun and is not over."""
        return self.reducer.phase() != _C.Phase.IDLE

    def is_unfinished(self) -> bool:
        """An iteration or a backward is not over, or a companion says so."""
        return self.is_under_way() or self.reducer.in_backward() or any(call() for call in self.observers.unfinished)

    def parameter_ids(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters.reduced}

    def yield_ownership(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Another wrapper has been made around some of ``parameters``. Gives up an iteration that was left unfinished
        here; not one that waits for finalize_backward(), nor a forward that waits for its backward."""
        waits = self.reducer.phase() == _C.Phase.LAUNCHED and self.reducer.ready_to_finalize()
        if waits or not self.is_unfinished():
            return
        if not self.parameter_ids().isdisjoint(map(id, parameters)):
            self.abort_iteration()

    def check_finished(self) -> None:
        """Raises if the last synchronized backward left something undone, or cannot have ended."""
        for call in self.observers.checking:
            call()
        try:
            self.reducer.check_finished()
        except RuntimeError as error:
            self.failed(error, "backward")
            raise

    def report_failure(self, check: Callable[[], Result]) -> Result:
        """``check()``; what it raises is reported to the ranks that will wait for this one."""
        try:
            return check()
        except RuntimeError as error:
            self.failed(error, "backward")
            raise

    def failed(self, error: BaseException | str, where: str) -> None:
        """This rank raises ``error``: see :meth:`minddp.events.Observer.failed`."""
        for call in self.observers.failed:
            call(error, where)

    @property
    def parameter_names(self) -> Sequence[str]:
        return self.parameters.names


def _mean(divisor: int, ranks: int, hooked: bool) -> tuple[float, float]:
    return (1.0 if hooked else 1.0 / divisor), 1.0


def _detach(reducer: _C.Reducer) -> None:
    """Lets go of the parameters: another reducer takes them, or none."""
    reducer.remove_hooks()
    reducer.abort_iteration()
