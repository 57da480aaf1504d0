"""The paper's claims judged from made-up times: each verdict can go every way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bucket_report
import harness
import paper
from sweep import RAW, Point, Sweep

CURVES = [
    {"batch": batch, "skip": n, "loss": 0.1, "accuracy": 0.95 - (0.01 * n if batch == 256 else 0)}
    for batch in (8, 256)
    for n in paper.SKIPS
]


def seconds(point: Point) -> float:
    """A machine on which the paper is right."""
    if point.variant == RAW:
        return 0.9 if point.cap_mb == paper.CAPS[0] else 0.5
    if point.option.startswith("skip"):
        return 0.6 - 0.02 * int(point.option[-1])
    if point.option.startswith("groups"):
        return 0.7 - 0.02 * int(point.option[-1])
    if point.variant == "late":
        return 0.8
    caps = {paper.CAPS[0]: 1.0, 5.0: 0.55, paper.CAPS[-1]: 0.9}
    return caps.get(point.cap_mb, 0.6)


def case(path: Path, change: dict[Point, float] | None = None, rounds: int = 5, model: str = "m") -> Any:
    """A summary whose times are ``seconds``, those in ``change`` apart; a spread of 1 %."""
    sweep = Sweep(path, {"model": model, "engine": "gloo", "ranks": 2, "link": None})
    for point in paper.points():
        sweep.points[point.key] = point
        time = (change or {}).get(point, seconds(point))
        for number in range(rounds):
            visit = {"round": number, "point": point.key, "seconds": [time * (1 + 0.01 * (number - 2))]}
            sweep.visits.append(visit)
    return bucket_report.summarize(sweep)


CLAIMS = [
    (paper.claim_overlap, {paper.EARLY: 0.9}, {paper.EARLY: 0.805}),
    (paper.claim_small_collectives, {Point(RAW, paper.CAPS[0]): 0.4}, {Point(RAW, paper.CAPS[0]): 0.501}),
    (paper.claim_best_between, {Point("minddp", paper.CAPS[0]): 0.2}, {Point("minddp", paper.CAPS[-1]): 0.551}),
    (paper.claim_skip, {paper.skip(8): 0.7}, {paper.skip(8): 0.599}),
    (paper.claim_groups, {paper.groups(1): 0.3}, {paper.groups(1): 0.601}),
]


@pytest.mark.parametrize("claim, refuted, close", CLAIMS)
def test_a_claim_holds_fails_or_is_too_close(tmp_path, claim, refuted, close):
    path = tmp_path / "p.json"
    assert claim([case(path)]).verdict == paper.HOLDS
    assert claim([case(path), case(path, close)]).verdict == paper.UNCLEAR
    assert claim([case(path, rounds=2)]).verdict == paper.UNCLEAR
    found = claim([case(path), case(path, refuted)]).verdict
    assert found == (paper.UNCLEAR if claim is paper.claim_best_between else paper.FAILS)


def test_the_best_size_depends_on_the_model(tmp_path):
    other = {Point("minddp", 1.0): 0.2}
    first, second = case(tmp_path / "a.json"), case(tmp_path / "b.json", other, model="n")
    assert paper.claim_best_depends([first]).verdict == paper.UNTESTED
    assert paper.claim_best_depends([first, second]).verdict == paper.HOLDS
    assert paper.claim_best_depends([first, case(tmp_path / "c.json", model="n")]).verdict == paper.FAILS


def test_learning():
    assert [v.verdict for v in paper.claims_learning(CURVES)] == [paper.HOLDS, paper.HOLDS]
    swapped = [{**curve, "batch": 264 - curve["batch"]} for curve in CURVES]
    assert [v.verdict for v in paper.claims_learning(swapped)] == [paper.FAILS, paper.FAILS]


def test_the_command_writes_figures_and_verdicts(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(paper, "measure", lambda arguments, model, engine: case(tmp_path / model, model=model))
    monkeypatch.setattr(paper, "learning_curves", lambda arguments: CURVES)
    assert paper.main(["--models", "a,b", "--output", str(tmp_path)]) == 0
    verdicts = json.loads((tmp_path / "paper.json").read_text())["verdicts"]
    assert len(verdicts) == 11
    assert {v["verdict"] for v in verdicts} == {paper.HOLDS, paper.FAILS, paper.UNTESTED}
    assert "[holds here] section 5.1" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "paper.html").read_text()
    assert (tmp_path / "paper.png").stat().st_size > 10_000


def test_one_rank_is_refused():
    with pytest.raises(harness.BenchmarkError, match="--ranks must be at least 2"):
        paper.parse(["--ranks", "1"])
