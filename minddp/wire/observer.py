"""The arguments ``wire`` and ``ordered`` of one wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import environment, events
from ..parameters import plainly
from ..reducer import Plan, Stage
from . import Wire, make_wire
from .format import WireFormat


class Settings(NamedTuple):
    wire: Wire | None
    ordered: bool


class WireObserver(events.Observer):
    """What one wrapper's gradients travel as.

    Attributes:
        format: that, and what rounding has lost.
    """

    name = "wire"
    options = {"wire": None, "ordered": False}
    arguments = """
        wire: what gradients travel as: ``"bf16"``, ``"fp16"``, ``"int8"`` (a quarter of float32's bytes, with error
            feedback), or a :class:`minddp.Wire`, which has the details. They are summed in float32, in the order of
            ranks; vectors travel as they are.
        ordered: each gradient is summed in the order of ranks: the same bits whatever the buckets are, and over Gloo
            as over shared memory.
    """
    settings: Settings

    def __init__(self, ddp: Any, settings: Settings):
        super().__init__(ddp, settings)
        self.format = WireFormat(*settings, ddp.process_group, environment.always_reduce())

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        return Settings(make_wire(values["wire"]), bool(values["ordered"]))

    @property
    def range_hint(self) -> str:
        """For messages about what is not finite."""
        return "" if self.settings.wire is None else self.settings.wire.range_hint

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        wire, ordered = self.settings
        return {"wire": wire and [wire.dtype, wire.error_feedback], "ordered": ordered}

    def planning(self, plan: Plan) -> None:
        wire = self.settings.wire
        if wire is not None and plan.reduce_dtype is not None:
            reductions = self.averager.observers.settings.get("reductions")
            other = "mixed_precision" if getattr(reductions, "reduce_dtype", None) is None else "reduce_dtype"
            raise ValueError(f"wire={wire.dtype!r} and {other} both say what travels: leave one of them out")
        self.format.group = plan.group
        if not self.format.is_in_force:
            return
        with plainly():
            plan.dtypes = self.format.dtypes(plan.names, plan.parameters, plan.sparse, plan.plain_dtypes())
            for case in self.format.cases(plan.parameters, plan.dtypes):
                plan.add(case, Stage.KINDS)

    def buckets_changed(self, reducer: Any) -> None:
        if self.format.is_in_force:
            with plainly():
                self.format.follow_layouts()

    def hooking(self, steps: bool) -> None:
        if self.settings.wire is not None or self.settings.ordered:
            raise RuntimeError(
                "a communication hook reduces buckets itself, and wire= and ordered= say how they are reduced: leave "
                "those out, or the hook"
            )

    def step_skipped(self) -> None:
        self.format.forget_losses()


OBSERVER = WireObserver
