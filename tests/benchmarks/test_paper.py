"""The comparison with the paper, from made-up times: its command writes figures and verdicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bucket_report
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
