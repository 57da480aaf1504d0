"""What averages one wrapper's gradients: its reducer, and the one place where that is made and remade.

What always holds: at most one of the wrapper's reducers has hooks on its parameters, and every observer knows that
one. Whoever changes what a reducer is made from ends in :meth:`Averager.rebuild`. That runs between iterations, on
the thread that calls forward.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _C, environment
from .config import Config
from .events import Observers
from .hooks import builtin_dtype, name_of, waits_in_callbacks
from .parameters import Parameters
from .reducer import Plan, Reducer, weakly

Result = TypeVar("Result")

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
        hook: ``(state, hook)`` as registered, or ``(None, builtin type)``; None: the reducer's own all-reduce.
        has_foreign_group: the group is written in Python. It may do anything, and change its size.
        has_rebuilt_buckets: buckets follow the order of arrival.
        is_joining: the last synchronized forward ran inside of ``join()``.
        watch: called while a collective of backward does not end: see :meth:`watch_waits`.
    """

    reducer: Reducer

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
        self.has_rebuilt_buckets = self.is_joining = False
        self._made = False
        observers.of_averager(self)
        self.rebuild()
        with _lock:
            _alive[next(_numbers)] = self

    def __del__(self) -> None:
        """A collective that was given up may keep the reducer's C++ half alive. Its hooks are removed: they must not
        run beside the next wrapper's."""
        if self.__dict__.get("_made") and not sys.is_finalizing():
            self.reducer.detach()

    # --- making ---

    def rebuild(self, config: Config | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Detaches the reducer there is and makes one for what holds now. REQUIRES: no backward is running."""
        before = self.reducer if self._made else None
        if before is not None:
            before.detach()
        self.config, self.group = config or self.config, group or self.group
        self.has_foreign_group = type(self.group) is not dist.ProcessGroup
        self.has_rebuilt_buckets = False
        plan = Plan(
            list(self.parameters.reduced),
            list(self.parameters.names),
            self.parameters.expect_sparse(),
            self.parameters.device,
            self.group,
            self.config,
            always_reduce=self.has_foreign_group or environment.always_reduce(),
            reduce_dtype=None if self.hook is None else builtin_dtype(self.hook),
        )
        for call in self.observers.planning:
            call(plan)
        self.reducer = Reducer(plan, self.observers.after_last_launch)
        self._made = True
        self.reducer.on_cut = weakly(self._buckets_changed)
        if before is not None:
            self.reducer.take_over(before)
            self.reducer.sync_enabled = before.sync_enabled
            self.reducer.optimizer_in_backward = before.optimizer_in_backward
        for call in self.observers.reducer_made:
            call(self.reducer, before)
        self._place_hook()

    def _buckets_changed(self) -> None:
        for call in self.observers.buckets_changed:
            call(self.reducer)

    def watch_waits(self, watch: Callable[[float, int, str], None]) -> None:
        """``watch(seconds, bucket, error)`` is called once a second while the collective of ``bucket`` does not end,
        and when it has failed with ``error``. May raise. Held by the caller."""
        self.watch = weakly(watch)
        self.reducer.set_callbacks(on_stall=self.watch)

    # --- the communication hook ---

    @property
    def has_builtin_hook(self) -> bool:
        return self.hook is not None and isinstance(self.hook[1], dist.BuiltinCommHookType)

    def set_hook(self, state: object, hook: Any) -> None:
        """Uses ``hook`` from now on. A builtin hook is a dtype on the wire: the reducer is made anew with it."""
        self.hook = (state, hook)
        if self.has_builtin_hook:
            self.rebuild()
        else:
            self._place_hook()

    def _place_hook(self) -> None:
        users = self.hook is not None and not self.has_builtin_hook
        if self.hook is not None:
            for call in self.observers.hook_changed:
                call(name_of(self.hook[1]))
        if users or self.observers.bucket_packed:
            # C++ knows only this one; what users register stays where Python's garbage collector sees it.
            self.reducer.set_comm_hook(None, weakly(self._reduce))
        if users:
            self.reducer.averages_itself()

    def _reduce(self, _: object, bucket: Any) -> Any:
        for call in self.observers.bucket_packed:
            call(bucket)
        if self.hook is None or self.has_builtin_hook:
            return self.reducer._run_allreduce_hook(bucket)
        state, hook = self.hook
        future = self._run_hook(state, hook, bucket)
        if self.parameters.device.type == "cpu" and waits_in_callbacks(state):
            watch, index = self.watch, bucket.index()
            _C.wait_for_future(future, watch and (lambda waited, error: watch(waited, index, error)))
        return future

    def _run_hook(self, state: object, hook: Callable[..., Any], bucket: Any) -> Any:
        try:
            return hook(state, bucket)
        except Exception as error:
            self.failed(error, "backward")
            raise

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
            self.reducer.set_divisor(self.group.size())
        if self.config.skip_all_reduce_unused_params:  # a joined rank sends all buckets: it knows nobody's flags
            self.reducer.set_skip_all_reduce_unused(not joining)
        for call in self.observers.before_forward:
            call(joining)

    def rebuild_buckets(self) -> None:
        """Along the order of arrival, once. Collective."""
        if self.reducer._rebuild_buckets(self.observers.together):
            self.has_rebuilt_buckets = True
            for call in self.observers.rebuilt:
                call(self.reducer)
            for call in self.observers.named:
                call(self.reducer.agreed_token)

    def abort_iteration(self) -> None:
        """Gives up the iteration that is under way: back to the state between two."""
        for call in self.observers.aborting:
            call()
        self.reducer.abort_iteration()

    def shadow_backward(self) -> None:
        """A rank without data takes part in the others' backward, with zeros. Collective."""
        for call in self.observers.shadowing:
            call()
        self.reducer.shadow_backward()

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

    # --- what others read ---

    @property
    def parameter_names(self) -> Sequence[str]:
        return self.parameters.names

    def names_of_parameters(self) -> dict[torch.Tensor, str]:
        """Of those that are reduced."""
        return dict(zip(self.parameters.reduced, self.parameters.names))
