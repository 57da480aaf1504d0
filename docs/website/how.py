"""The model behind the page "How DDP works" (docs/how.html), and the page itself: as it stands, and in the site.

The page's script computes the same numbers in JavaScript; tests/docs/test_how.py holds both equal over drawn
settings. Here they come from the package (the reducer's rule for buckets, the optimum) and from benchmarks/optimum
(the replay of a step).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from minddp.buckets import assign_buckets, torchs_buckets
from minddp.config import make_config
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


_FLAGS = ("gradient_as_bucket_view", "skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation")


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
    nbytes = profiles()[model].nbytes
    return assign_buckets(nbytes, [0] * len(nbytes), range(len(nbytes)), [round(cap_mb * MIB)])


def simulate(setting: Setting) -> dict[str, float]:
    """One step: its seconds, those that backward does not hide; those of the best uniform size, of the plan, and of
    what torch's class and minddp's do by default on CPUs."""
    measured = profiles()[setting.model]
    profile = slowed(measured, 1 / setting.speed)
    profile = replace(profile, tail_seconds=measured.tail_seconds / setting.speed)
    cost = Ring(LinearCost(setting.latency_us * 1e-6, 8 / (setting.link_gbit * 1e9))).cost(setting.ranks)
    late = LATE * profile.local_seconds if setting.late else 0.0

    def seconds(cap_mb: float) -> float:
        return late + simulate_step(profile, uniform_buckets(setting.model, cap_mb), cost).step_seconds

    mine = simulate_step(profile, uniform_buckets(setting.model, setting.cap_mb), cost)
    best = min(CAPS_MB, key=seconds)
    nbytes, default = profile.nbytes, make_config(**dict.fromkeys(_FLAGS, False))
    kinds, order = [0] * len(nbytes), range(len(nbytes))
    caps, large = default.caps_for(sum(nbytes)), default.alone_from("cpu") or math.inf
    alone = [i + 1 if size >= large else 0 for i, size in enumerate(nbytes)]

    def of_default(buckets: list[list[int]]) -> float:
        return late + simulate_step(profile, buckets, cost).step_seconds

    plan = optimal_plan(profile.ready_seconds, profile.nbytes, cost)
    return {
        "step": late + mine.step_seconds,
        "exposed": max(0.0, mine.finish_seconds - profile.backward_seconds),
        "alone": profile.local_seconds,
        "buckets": len(uniform_buckets(setting.model, setting.cap_mb)),
        "best_seconds": seconds(best),
        "torch_seconds": of_default(torchs_buckets(nbytes, kinds, order, default.torch_caps)),
        "minddp_seconds": of_default(assign_buckets(nbytes, alone, order, caps, default.last_cap)),
        "plan_seconds": late + simulate_step(profile, plan.buckets, cost).step_seconds,
        "plan_buckets": len(plan.buckets),
    }


# ---- the page

DATA = re.compile(r"^const MEASURED = .*;$", re.MULTILINE)
CLONE_ONLY = re.compile(r'^<span id="clone">.*\n|^<!-- Pages of the site.*\n', re.MULTILINE)


def data() -> str:
    """The line of the page's script that holds what was measured: times in microseconds."""
    found: dict[str, Any] = {}
    for name, profile in profiles().items():
        seconds = (profile.forward_seconds, profile.backward_seconds, profile.tail_seconds, *profile.ready_seconds)
        forward, backward, tail, *ready = (round(1e6 * value) for value in seconds)
        times = {"forward": forward, "backward": backward, "tail": tail, "ready": ready}
        found[name] = {**times, "nbytes": profile.nbytes}
    return f"const MEASURED = {json.dumps(found, separators=(',', ':'))};"


# In a clone, the page's links lead to where `make site` puts the pages.
IN_CLONE = "../build/docs/html/"


def for_site(pages: Collection[str]) -> str:
    """The page as the site's first: its links lead to the site's pages, whose names are given."""

    def link(match: re.Match[str]) -> str:
        page = match[1].removeprefix(IN_CLONE).partition("#")[0].removesuffix(".html")
        if page not in pages or not match[1].startswith(IN_CLONE):
            raise ValueError(f"docs/how.html: a link to {match[1]}, which is no page of the site")
        return f'href="{match[1].removeprefix(IN_CLONE)}"'

    return re.sub(r'href="((?!#|\w+:)[^"]+)"', link, CLONE_ONLY.sub("", PAGE.read_text()))


if __name__ == "__main__":  # python -m docs.website.how: what was measured anew goes into the page
    PAGE.write_text(DATA.sub(lambda _: data(), PAGE.read_text()))
