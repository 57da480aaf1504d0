"""A choice of buckets, saved and loaded, tied to the parameters of the model that it was made for.

What always holds: a plan's buckets partition the positions 0..n-1; no bucket mixes kinds (dtype, device). A plan that
knows its model's parameters is refused by any other model.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..documents import misfit, parse, path_text, write_whole

__all__ = ["BucketPlan", "ParameterInfo"]

_FORMAT = "minddp bucket plan"
_VERSION = 1
_SHAPE = {
    "buckets": [[int]],
    "finish_seconds": (float, int, None),
    "parameters": ([{"name": str, "shape": [int], "dtype": str}], None),
    "signature": (str, None),
    "notes": dict,
}
_NUMBER = (float, int)
_TRIAL = {"name": str, "buckets": int, "steps": int, "step_seconds": _NUMBER, "quartiles": [_NUMBER]}
_MEASURED = {"choice": str, "trials": [_TRIAL], "model?": str, "ranks?": int, "backend?": str}  # notes of "auto"
_MIB = 1 << 20


@dataclass(frozen=True)
class ParameterInfo:
    """What a plan remembers of a parameter: enough to recognise its model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """Buckets of gradients, in launch order.

    Attributes:
        buckets: a list per bucket, of positions in ready order.
        finish_seconds: when the last bucket is done, in seconds since backward began, as the cost
            model predicts it; None for buckets that nobody predicted.
        parameters: the parameter at each position, or None for a plan of bare numbers.
        signature: digest of the parameters' names, shapes and dtypes, whatever their order; None
            without ``parameters``.
        notes: what else is worth keeping with a plan (how it was found, measured seconds); values
            that JSON can hold.
    """

    buckets: list[list[int]]
    finish_seconds: float | None = None
    parameters: list[ParameterInfo] | None = None
    signature: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Python's own numbers, whatever came (NumPy's): JSON knows no others.
        try:
            buckets = [[operator.index(position) for position in bucket] for bucket in self.buckets]
        except TypeError:
            raise TypeError(
                "BucketPlan: buckets must be a list of lists of positions, such as [[0, 1], [2]], got "
                f"{self.buckets!r:.200}"
            ) from None
        object.__setattr__(self, "buckets", buckets)
        if self.finish_seconds is not None:
            object.__setattr__(self, "finish_seconds", float(self.finish_seconds))
        positions = sorted(position for bucket in self.buckets for position in bucket)
        if positions != list(range(len(positions))) or not all(self.buckets):
            raise ValueError("BucketPlan: buckets must hold every position from 0 exactly once, none be empty")
        if self.parameters is not None and len(self.parameters) != len(positions):
            raise ValueError(
                f"BucketPlan: {len(self.parameters)} parameters for {len(positions)} positions in buckets"
            )

    def __repr__(self) -> str:
        return f"BucketPlan({self._size()})"

    def __str__(self) -> str:
        """A table of the buckets; above it what was measured, if ``"auto"`` or ``minddp tune`` made the plan."""
        lines = [self._size(), f"{'bucket':>6}{'MiB':>9}{'gradients':>11}  which, in launch order"]
        for number, bucket in enumerate(self.buckets, 1):
            size = "" if self.parameters is None else f"{sum(map(self._nbytes, bucket)) / _MIB:.2f}"
            members = bucket if self.parameters is None else [self.parameters[position].name for position in bucket]
            lines.append(f"{number:>6}{size:>9}{len(bucket):>11}  {_shorten([str(name) for name in members], 3)}")
        return "\n".join([*self._measured_lines(), *lines])

    def _size(self) -> str:
        count = sum(map(len, self.buckets))
        text = f"{_counted(len(self.buckets), 'bucket')}, {_counted(count, 'gradient')}"
        return text if self.parameters is None else f"{text}, {sum(map(self._nbytes, range(count))) / _MIB:.1f} MiB"

    def _nbytes(self, position: int) -> int:
        assert self.parameters is not None
        parameter = self.parameters[position]
        return math.prod(parameter.shape) * getattr(torch, parameter.dtype).itemsize

    def _trials(self) -> list[dict[str, Any]]:
        """What was measured, the default first; empty where nothing was, or another version measured it."""
        return [] if misfit(self.notes, _MEASURED) else self.notes["trials"]

    def _measured_lines(self) -> list[str]:
        if not (trials := self._trials()):
            return []
        lines = [f"{'choice':<20}{'buckets':>8}{'steps':>7}{'step, ms':>10}{'quartiles':>18}"]
        for trial in trials:
            lines.append(
                f"{trial['name']:<20}{trial['buckets']:>8}{trial['steps']:>7}{1e3 * trial['step_seconds']:>10.1f}"
                f"{_quartiles(trial):>18}" + "  <- kept" * (trial["name"] == self.notes["choice"])
            )
        return [*lines, self.summary(), ""]

    def summary(self) -> str:
        """One line: what was tried and kept, with both quartiles. REQUIRES: ``"auto"`` or ``minddp tune`` made it."""
        default, *others = trials = self._trials()
        tried = f"tried {len(trials)}, kept"
        for trial in others:
            if trial["name"] == self.notes["choice"]:
                return f"{tried} {trial['name']}: {_milliseconds(default)} -> {_milliseconds(trial)} ms a step"
        next_best = min(others, key=lambda trial: trial["step_seconds"], default=None)
        text = f"{tried} the default: {_milliseconds(default)} ms a step"
        return text if next_best is None else f"{text}; {next_best['name']}: {_milliseconds(next_best)}"

    def draw(self, path: str | os.PathLike[str], *, link: str = "") -> None:
        """Draws the step of each choice that was measured, as .png, .svg or .pdf: a dot, and a bar for its quartiles.

        Args:
            path: where the picture goes.
            link: what joins the ranks, for the title, such as ``"1 Gbit/s"``.

        Raises:
            ValueError: nothing was measured: neither ``"auto"`` nor ``minddp tune`` made the plan.
            ImportError: matplotlib is not installed.
        """
        if not self._trials():
            raise ValueError('plan.draw: nothing was measured; bucket_cap_mb="auto" and minddp tune make such plans')
        from .picture import draw

        draw(self._trials(), self.notes["choice"], self._title(link)).savefig(path, dpi=130)

    def _title(self, link: str) -> str:
        notes, kept = self.notes, self.notes["choice"]
        ranks = f"{_counted(notes['ranks'], 'rank')}" if "ranks" in notes else ""
        size = "" if self.parameters is None else self._size().rpartition(", ")[2]
        facts = [notes.get("model"), size, ranks, notes.get("backend"), link]
        kept = "the default" if kept == self._trials()[0]["name"] else kept
        return f"{', '.join(filter(None, facts))}: {kept} is kept"

    @classmethod
    def of_indices(
        cls,
        buckets: Sequence[Sequence[int]],
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
        notes: Mapping[str, Any] | None = None,
    ) -> BucketPlan:
        """A plan of buckets of parameter indices, in launch order. The other arguments: see ``for_parameters``."""
        positions = iter(range(len(names)))
        plan = cls([[next(positions) for _ in bucket] for bucket in buckets], notes=dict(notes or {}))
        return plan.for_parameters(names, shapes, dtypes, [index for bucket in buckets for index in bucket])

    def for_parameters(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
        order: Sequence[int] | None = None,
    ) -> BucketPlan:
        """This plan, tied to a model's parameters, so that it can be saved and pinned.

        Args:
            names: the model's parameter names; ``shapes`` and ``dtypes`` belong to them in order.
            order: the parameter index at each position; positions are indices when None.
        """
        infos = _parameter_infos(names, shapes, dtypes)
        order = range(len(infos)) if order is None else order
        if sorted(order) != list(range(len(infos))):
            raise ValueError(f"order must hold each parameter index 0..{len(infos) - 1} once")
        parameters = [infos[index] for index in order]
        return replace(self, parameters=parameters, signature=_signature(parameters))

    def parameter_buckets(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]
    ) -> list[list[int]]:
        """The plan's buckets as indices into this model's parameters, in launch order.

        Args:
            names: names of the parameters that are reduced, each once.
            shapes: their shapes.
            dtypes: their dtypes.

        Raises:
            ValueError: the plan knows no parameters, or was made for others; the text names what is
                missing, left over and different.
        """
        if self.parameters is None:
            raise ValueError(
                "this bucket plan names no parameters, so it fits no model; tie it to one with "
                "plan.for_parameters(names, shapes, dtypes, order)"
            )
        infos = _parameter_infos(names, shapes, dtypes)
        if _signature(infos) != self.signature:
            raise ValueError(_mismatch(self.parameters, infos))
        index = {info.name: position for position, info in enumerate(infos)}
        return [[index[self.parameters[position].name] for position in bucket] for bucket in self.buckets]

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan in ``text``; ValueError when it is none, is of a later version, or was altered."""
        try:
            document = parse(text)
        except ValueError as error:
            raise ValueError(f"not a bucket plan: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError("not a bucket plan: this JSON was not written by BucketPlan.save")
        if document.get("version") != _VERSION:
            raise ValueError(
                f"bucket plan of version {document.get('version')!r}; this minddp reads version {_VERSION}"
            )
        if why := misfit(document, _SHAPE):
            raise ValueError(f"bucket plan is incomplete or misshapen: {why}")
        listed, finish = document["parameters"], document["finish_seconds"]
        parameters = listed and [ParameterInfo(p["name"], tuple(p["shape"]), p["dtype"]) for p in listed]
        plan = cls(document["buckets"], finish, parameters, document["signature"], document["notes"])
        if parameters is not None and _signature(parameters) != plan.signature:
            raise ValueError("bucket plan was altered: its signature is not that of its parameters")
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; a reader sees the old file or the new one, never half of it."""
        write_whole(path_text(path, "BucketPlan.save: path"), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """The plan that ``save`` wrote; OSError when there is no file, ValueError when it is no plan."""
        text = path_text(path, "BucketPlan.load: path")
        try:
            with open(text, encoding="utf-8", errors="replace") as stream:
                return cls.from_json(stream.read())
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from error


def _quartiles(trial: Mapping[str, Any]) -> str:
    """In milliseconds."""
    low, high = trial["quartiles"]
    return f"[{1e3 * low:.1f}, {1e3 * high:.1f}]"


def _milliseconds(trial: Mapping[str, Any]) -> str:
    return f"{1e3 * trial['step_seconds']:.1f} {_quartiles(trial)}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _parameter_infos(
    names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]
) -> list[ParameterInfo]:
    if not len(names) == len(shapes) == len(dtypes):
        raise ValueError(
            "names, shapes and dtypes must have one entry a parameter, "
            f"got {len(names)}, {len(shapes)} and {len(dtypes)}"
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise ValueError(f"names holds a parameter twice: {', '.join(twice)}")
    return [
        ParameterInfo(name, tuple(int(extent) for extent in shape), str(dtype).removeprefix("torch."))
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    ]


def _signature(parameters: Sequence[ParameterInfo]) -> str:
    rows = sorted((p.name, list(p.shape), p.dtype) for p in parameters)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _mismatch(planned: Sequence[ParameterInfo], given: Sequence[ParameterInfo]) -> str:
    """Why a plan is refused: what it has that the model has not, the other way round, and changes."""
    before, now = {p.name: p for p in planned}, {p.name: p for p in given}
    changed = [
        f"{name} ({_describe(before[name])} in the plan, {_describe(now[name])} here)"
        for name in before.keys() & now.keys()
        if before[name] != now[name]
    ]
    facts = [
        ("missing here", sorted(before.keys() - now.keys())),
        ("not in the plan", sorted(now.keys() - before.keys())),
        ("changed", sorted(changed)),
    ]
    lines = [f"  {what}: {_shorten(names)}" for what, names in facts if names]
    return (
        "bucket_plan: this plan was made for another model\n"
        + "\n".join(lines)
        + '\nUse the plan of this model, or drop bucket_plan (bucket_cap_mb="auto" makes a new one).'
    )


def _describe(parameter: ParameterInfo) -> str:
    return f"{parameter.dtype}[{', '.join(map(str, parameter.shape))}]"


def _shorten(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
