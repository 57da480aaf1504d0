"""The model behind the page "How DDP works" (docs/how.html), and the page itself: as it stands, and in the site.

The page's script computes the same numbers in JavaScript; tests/docs/test_how.py holds both equal over drawn
settings. Here they come from the package (the reducer's rule for buckets, the optimum) and from benchmarks/optimum
(the replay of a step).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from minddp.planner import LinearCost, optimal_plan

from .layout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from optimum.backward_profile import BackwardProfile, simulate_step
from topologies import Ring, slowed

PAGE = ROOT / "docs" / "how.html"
MEASURED = ROOT / "docs" / "website" / "how.json"
MIB = 1 << 20
# The sizes of the slider and of the curve, in MiB: from 0.25 to 50 in equal ratios, two digits each.
CAPS_MB = [float(f"{0.25 * 200 ** (k / 60):.2g}") for k in range(61)]
LATE = 0.3  # how late rank 1 begins a step, as a part of a step without communication


@dataclass(frozen=True)
class Setting:
    """The page's sliders: ``link_gbit`` and ``latency_us`` are of one hop, ``speed`` is relative to the measured."""

    model: str
    cap_mb: float
    link_gbit: float
    latency_us: float
    ranks: int
    speed: float
    late: bool = False


@lru_cache
def profiles() -> dict[str, BackwardProfile]:
    """What benchmarks/backward_profiles.py measured, by model."""
    fields = ("ready_seconds", "nbytes", "backward_seconds", "forward_seconds", "tail_seconds")
    measured = json.loads(MEASURED.read_text())["profiles"]
    return {name: BackwardProfile(*(found[field] for field in fields)) for name, found in measured.items()}


@lru_cache(maxsize=512)
def uniform_buckets(model: str, cap_mb: float) -> list[list[int]]:
    """As the reducer cuts them with ``bucket_cap_mb=cap_mb``."""
    from minddp.buckets import assign_buckets

    nbytes = profiles()[model].nbytes
    return assign_buckets(nbytes, [0] * len(nbytes), range(len(nbytes)), [round(cap_mb * MIB)])


def simulate(setting: Setting) -> dict[str, float]:
    """One step: its seconds, those that backward does not hide; the same for the best uniform size and the plan."""
    measured = profiles()[setting.model]
    profile = slowed(measured, 1 / setting.speed)
    profile = replace(profile, tail_seconds=measured.tail_seconds / setting.speed)
    cost = Ring(LinearCost(setting.latency_us * 1e-6, 8 / (setting.link_gbit * 1e9))).cost(setting.ranks)
    late = LATE * profile.local_seconds if setting.late else 0.0

    def seconds(cap_mb: float) -> float:
        return late + simulate_step(profile, uniform_buckets(setting.model, cap_mb), cost).step_seconds

    mine = simulate_step(profile, uniform_buckets(setting.model, setting.cap_mb), cost)
    best = min(CAPS_MB, key=seconds)
    plan = optimal_plan(profile.ready_seconds, profile.nbytes, cost)
    return {
        "step": late + mine.step_seconds,
        "exposed": max(0.0, mine.finish_seconds - profile.backward_seconds),
        "alone": profile.local_seconds,
        "buckets": len(uniform_buckets(setting.model, setting.cap_mb)),
        "best_seconds": seconds(best),
        "plan_seconds": late + simulate_step(profile, plan.buckets, cost).step_seconds,
        "plan_buckets": len(plan.buckets),
    }


# ---- the page

DATA = re.compile(r"^const MEASURED = .*;$", re.MULTILINE)


def data() -> str:
    """The line of the page's script that holds what was measured: times in microseconds."""
    found: dict[str, Any] = {}
    for name, profile in profiles().items():
        seconds = (profile.forward_seconds, profile.backward_seconds, profile.tail_seconds, *profile.ready_seconds)
        forward, backward, tail, *ready = (round(1e6 * value) for value in seconds)
        times = {"forward": forward, "backward": backward, "tail": tail, "ready": ready}
        found[name] = {**times, "nbytes": profile.nbytes}
    return f"const MEASURED = {json.dumps(found, separators=(',', ':'))};"


def for_site(page_of: Callable[[str], str | None]) -> str:
    """The page as the site's first: a link to a file of the repository leads to the page that shows it."""

    def link(match: re.Match[str]) -> str:
        name, mark, place = match[1].partition("#")
        page = page_of(os.path.normpath(f"docs/{name}"))
        if page is None:
            raise ValueError(f"docs/how.html: a link to {name}, which has no page")
        return f'href="{page}.html{mark}{place}"'

    return re.sub(r'href="((?!#|\w+:)[^"]+)"', link, PAGE.read_text())


if __name__ == "__main__":  # python -m docs.website.how: what was measured anew goes into the page
    PAGE.write_text(DATA.sub(lambda _: data(), PAGE.read_text()))
