"""The planner's half of a wrapper: a pinned plan, the search for one, and the plan in force."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .. import events
from ..functions import averager_of
from ..reducer import Plan
from .autotune import AutoTuner
from .plan import BucketPlan


class Settings(NamedTuple):
    bucket_plan: BucketPlan | None


class Planner(events.Observer):
    """A plan of buckets that one wrapper was given, or searches.

    Attributes:
        tuner: with ``bucket_cap_mb="auto"``, what searches.
    """

    name = "planner"
    tunes_buckets = True
    options = {"bucket_plan": None}
    arguments = """
        bucket_plan: a :class:`minddp.planner.BucketPlan` to pin, or the path of a saved one.
    """
    settings: Settings

    def __init__(self, ddp: Any, settings: Settings):
        super().__init__(ddp, settings)
        self.tuner: AutoTuner | None = None
        self._model = type(ddp.module).__name__
        self._pinned, self._auto = settings.bucket_plan, ddp._minddp_config.auto_tune
        if self._pinned is not None and self._auto:
            raise ValueError('bucket_plan= pins the buckets, bucket_cap_mb="auto" searches them: pass one')

    def listens(self, event: str) -> bool:
        return event != "before_forward" or self._auto

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        return Settings(_plan(values["bucket_plan"]))

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        return {"bucket_plan": _identity(self._pinned)}

    def planning(self, plan: Plan) -> None:
        if self._pinned is not None:
            plan.buckets = self._pinned.parameter_buckets(*self.averager.parameters.facts())

    def reducer_made(self, reducer: Any, before: Any) -> None:
        self.tuner = AutoTuner(self.averager, self._model) if self._auto else None

    def before_forward(self, joining: bool) -> None:
        if self.tuner is not None and not joining:  # a joined rank would not take part in its collectives
            self.tuner.before_forward()

    def hooking(self, steps: bool) -> None:
        if self.tuner is not None:
            raise RuntimeError(
                'bucket_cap_mb="auto" re-plans buckets while training, and hooks may keep state by bucket: '
                "tune without the hook, then pin the plan (bucket_plan=)"
            )

    def refreshing(self, ddp: Any) -> None:
        self._pinned = None  # it was made for other parameters


def bucket_plan(ddp: torch.nn.Module) -> BucketPlan:
    """The buckets in force as a :class:`minddp.planner.BucketPlan`: print it, save it, pin it with ``bucket_plan=``.

    Raises:
        RuntimeError: every parameter's reduction is delayed.
    """
    averager = averager_of(ddp, "bucket_plan")
    planner = averager.observers.get("planner")
    if planner is not None and planner.tuner is not None and planner.tuner.plan is not None:
        plan: BucketPlan = planner.tuner.plan
        return plan
    return BucketPlan.of_indices(averager.reducer.buckets(), *averager.parameters.facts())


def _plan(value: Any) -> BucketPlan | None:
    if isinstance(value, (str, os.PathLike)):
        try:
            return BucketPlan.load(value)
        except OSError as error:
            raise OSError(error.errno, f"bucket_plan cannot be read: {error.strerror}", os.fspath(value)) from error
    if value is None or isinstance(value, BucketPlan):
        return value
    raise TypeError(f"bucket_plan must be a minddp.BucketPlan or the path of a saved one, got {value!r}")


def _identity(plan: BucketPlan | None) -> Any:
    """What two ranks' plans must share: which parameters, in which order, in which bucket."""
    if plan is None or plan.parameters is None:
        return plan and plan.buckets
    return [[plan.parameters[position].name for position in bucket] for bucket in plan.buckets]


OBSERVER = Planner
