"""Visits: one variant measured for a few steps, again and again, in rounds; kept as they come.

A sweep's result is a JSON document with ``settings``, ``machine``, ``points`` and ``visits``. It is written
after every visit, so that an interrupted sweep loses one visit at most and goes on where it was.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
from harness import BenchmarkError, Ranks

__all__ = ["LOCAL", "RAW", "WARMUP", "Point", "Sweep", "visit"]

WARMUP = 3  # steps: both DDP classes rebuild their buckets after the first
LOCAL, RAW = "local", "raw"


@dataclass(frozen=True)
class Point:
    """What one visit measures.

    Attributes:
        variant: a name of benchmarks/variants.py, or ``"raw"``: the collectives alone.
        cap_mb: ``bucket_cap_mb`` in MiB, ``"default"`` (not passed), ``"auto"``, ``"optimum"`` (the buckets
            that ``optimum/planned.py`` computes), or None where the variant has no buckets.
        option: see ``with_option`` of benchmarks/variants.py; else "".
    """

    variant: str
    cap_mb: float | str | None = None
    option: str = ""

    @property
    def key(self) -> str:
        """A name that is unique in a sweep, and readable."""
        cap = "" if self.cap_mb is None else f" {self.cap_mb}"
        return f"{self.variant}{cap}{' ' if self.option else ''}{self.option}"


# ---- on the ranks

_workloads: dict[str, Any] = {}


def visit(
    rank: int, world_size: int, engine: str, model: str, point: Point, steps: int, plan: str | None
) -> dict[str, Any]:
    """Measures ``point``: this rank's seconds of ``steps`` steps, and what the buckets were.

    ``plan`` (JSON) is what an earlier visit of an ``"auto"`` or ``"optimum"`` point found; without it this visit
    finds it first.
    """
    import models
    import torch
    import variants

    device = harness.rank_device(engine, rank)
    if model not in _workloads:
        _workloads.clear()  # one model at a time: they are large
        _workloads[model] = models.workload(model, device, rank)
    base = _workloads[model]
    torch.manual_seed(rank)
    if point.variant == RAW:
        sizes = base.sizes()
        groups = variants.group_by_cap(sizes, float(point.cap_mb or 0))
        sizes = [sum(sizes[index] for index in group) for group in groups]
        return {"seconds": variants.timed(variants.raw_collectives(sizes, device), steps)}
    work = models.Workload(model, copy.deepcopy(base.module), base.call)
    if plan is None and point.cap_mb in ("auto", "optimum"):
        plan = _find_plan(point, work, device)
    step = variants.make_step(point.variant, work, device, **_bucket_arguments(point, plan))
    call, length = variants.with_option(step, point.option)
    for _ in range(WARMUP):
        step()
    before = variants.sent_bytes()
    seconds = [total / length for total in variants.timed(call, steps)]
    sent = (variants.sent_bytes() - before) // (steps + 1) // length
    found = {"seconds": seconds, "sent_bytes": sent, "bucket_bytes": step.bucket_bytes(), "plan": plan}
    if point.variant.startswith("minddp"):
        import minddp

        found["pack_seconds"] = sum(bucket.pack_seconds for bucket in minddp.last_step(step.wrapped).buckets)
    del step, call
    gc.collect()  # the wrapper is part of reference cycles; its hooks go with it
    return found


def _find_plan(point: Point, work: Any, device: Any) -> str:
    """Lets ``bucket_cap_mb="auto"`` settle, or computes the optimum; the plan that was found, as JSON."""
    import variants
    from optimum.planned import find_plan

    from minddp.cli.tune import tune

    copied = replace(work, module=copy.deepcopy(work.module))
    if point.cap_mb == "optimum":
        step = variants.make_step(point.variant, copied, device)
        return find_plan(step.wrapped, step).to_json()
    step = variants.make_step(point.variant, copied, device, bucket_cap_mb="auto")
    return tune(step.wrapped, work.call).to_json()


def _bucket_arguments(point: Point, plan: str | None) -> dict[str, Any]:
    if plan is not None:
        from minddp.planner import BucketPlan

        return {"bucket_plan": BucketPlan.from_json(plan)}
    return {} if point.cap_mb in (None, "default") else {"bucket_cap_mb": point.cap_mb}


# ---- in the parent


class Sweep:
    """All visits of one model on one engine and link: measured, kept in a file, continued from it.

    Args:
        path: the JSON file.
        settings: what must not change between runs that add to the same file: ``model``, ``engine``,
            ``ranks``, ``link``, ``threads``, ``steps``.
        fresh: start over even if the file exists.

    Raises:
        BenchmarkError: the file belongs to a sweep with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], fresh: bool = False):
        self.path = path
        self.settings = settings
        self.points: dict[str, Point] = {}
        self.visits: list[dict[str, Any]] = []
        self.facts: dict[str, dict[str, Any]] = {}  # by point: its bucket_bytes, its plan
        if path.exists() and not fresh:
            self._continue(harness.read_json(path))

    def _continue(self, document: dict[str, Any]) -> None:
        old = document.get("settings", {})
        changed = [f"{key} {old.get(key)} -> {new}" for key, new in self.settings.items() if old.get(key) != new]
        if changed:
            raise BenchmarkError(
                f"{self.path} holds a sweep with other settings ({', '.join(changed)}): "
                "give --fresh to start over, or another --output"
            )
        self.points = {key: Point(**value) for key, value in document["points"].items()}
        self.visits, self.facts = document["visits"], document["facts"]

    def to_json(self) -> dict[str, Any]:
        """The result as stored."""
        points = {key: asdict(point) for key, point in self.points.items()}
        return {
            "command": harness.command(), "settings": self.settings, "machine": harness.machine(), "points": points,
            "facts": self.facts, "visits": self.visits,
        }  # fmt: skip

    def missing(self, points: Sequence[Point], rounds: int) -> list[tuple[int, Point]]:
        """The (round, point) pairs still to visit, in the order to visit them."""
        done = {(visit["round"], visit["point"]) for visit in self.visits}
        return [
            (number, point)
            for number, order in enumerate(harness.rounds(points, rounds))
            for point in order
            if (number, point.key) not in done
        ]

    def run(self, points: Sequence[Point], rounds: int, measure: Callable[..., Any] = visit) -> None:
        """Visits what is missing and writes the file after each; an interrupt loses the current visit."""
        missing = self.missing(points, rounds)
        self.points |= {point.key: point for point in points}
        if not missing:
            return
        settings = self.settings
        with Ranks(settings["ranks"], settings["engine"], settings["link"], settings["threads"]) as ranks:
            for number, point in _progress(missing, settings["model"]):
                plan = self.facts.get(point.key, {}).get("plan")
                call = (settings["engine"], settings["model"], point, settings["steps"], plan)
                answers = ranks.run(measure, *call)
                self._keep(number, point, answers)

    def _keep(self, number: int, point: Point, answers: list[dict[str, Any]]) -> None:
        slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        self.visits.append({"round": number, "point": point.key, "seconds": slowest})
        if "pack_seconds" in answers[0]:
            self.visits[-1]["pack_seconds"] = answers[0].pop("pack_seconds")
        self.facts[point.key] = {key: value for key, value in answers[0].items() if key != "seconds"}
        harness.write_json(self.path, self.to_json())


def _progress(missing: Sequence[tuple[int, Point]], model: str) -> Iterator[tuple[int, Point]]:
    """Yields the visits, each after a line that says how many there are, and how long the others will take."""
    begin = time.monotonic()
    for place, (number, point) in enumerate(missing):
        left = (time.monotonic() - begin) / place * (len(missing) - place) / 60 if place else None
        remaining = "" if left is None else f", {left:.0f} min left" if left >= 1 else ", less than a minute left"
        print(f"{model}: {place + 1} of {len(missing)}{remaining}: {point.key}", file=sys.stderr, flush=True)
        yield number, point
