"""The bucket benchmark without ranks: what it visits, and how it goes on after an interrupt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minddp.planner import BucketPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bucket_size
import sweep as sweeping
from sweep import Point

CAPS = "1,4,25"
MEASURED = {"local": 0.200, "raw": 0.300, "naive": 0.600, "flat": 0.550, "per-parameter": 0.450}
BY_CAP = {1.0: 0.400, 4.0: 0.430, 25.0: 0.500, "default": 0.510, "auto": 0.390, "optimum": 0.380}
PLAN = BucketPlan([[0]], notes={"predicted_step_seconds": 0.350}).to_json()


class FakeRanks:
    """Two ranks that answer at once; the second is a little slower."""

    calls = 0
    interrupt_at: int | None = None

    def __init__(self, *arguments: Any):
        pass

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def run(self, fn: Any, engine: str, model: str, point: Point, steps: int, plan: Any) -> list[dict[str, Any]]:
        FakeRanks.calls += 1
        if FakeRanks.calls == FakeRanks.interrupt_at:
            raise KeyboardInterrupt
        seconds = MEASURED.get(point.variant) or BY_CAP[point.cap_mb] * (1.1 if point.variant == "torch" else 1)
        answer = {"bucket_bytes": [1 << 20, 3 << 20], "plan": PLAN if point.cap_mb == "optimum" else None}
        return [{"seconds": [seconds * slower] * steps, **answer} for slower in (0.9, 1.0)]


@pytest.fixture(autouse=True)
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "Ranks", FakeRanks)
    monkeypatch.setattr(FakeRanks, "calls", 0)
    monkeypatch.setattr(FakeRanks, "interrupt_at", None)


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--models", "mlp38", "--caps", CAPS, "--rounds", "3", "--output", str(folder), *more]


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "buckets-mlp38-gloo-2ranks.json").read_text())


def test_a_sweep_visits_every_point_in_every_round(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert bucket_size.main(arguments(tmp_path)) == 0
    visits = document(tmp_path)["visits"]
    points = {Point(**p).key for p in document(tmp_path)["points"].values()}
    # local, 3 raw, minddp with 3 caps, default, auto and optimum, torch with 3 and default, 3 without buckets
    assert len(points) == 17
    assert sorted((v["round"], v["point"]) for v in visits) == sorted((r, p) for r in range(3) for p in points)
    out = capsys.readouterr().out
    assert "minddp: the best uniform cap is 1 MiB, 400.0 [400.0, 400.0] ms; the default takes 510.0 [" in out
    assert "ms (+27.5%" in out
    assert 'minddp "auto": 390.0 [390.0, 390.0] ms with 2 buckets, -2.5% against the best uniform cap, -23.5%' in out
    assert "torch: the best uniform cap is 1 MiB, 440.0 [440.0, 440.0] ms" in out
    assert "the optimum's 2 buckets: 380.0 [380.0, 380.0] ms; computed were 350.0 ms, so the model is off by" in out
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in out.splitlines()
            if line.startswith("│")}  # fmt: skip
    times = "400.0 [400.0, 400.0]", "440.0 [440.0, 440.0]", "300.0 [300.0, 300.0]"
    assert rows["1"] == [times[0], "+14.3%", times[1], "+25.7%", times[2]]
    assert rows["the optimum's buckets"] == ["380.0 [380.0, 380.0]", "+8.6%", "", "", ""]
    assert rows["the optimum, computed"] == ["350.0", "", "", "", ""]


@pytest.mark.parametrize(
    ("rounds", "local", "says"), [("1", 0.2, "has 1 visit;"), ("3", 0.45, "less than a step without communication")]
)
def test_nothing_follows_from_too_few_visits_or_a_floor_above_a_result(
    tmp_path, capsys, monkeypatch, rounds, local, says
):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(MEASURED, "local", local)
    assert bucket_size.main(arguments(tmp_path, "--rounds", rounds, "--impl", "minddp")) == 0
    told = capsys.readouterr()
    assert "too noisy, nothing follows: " in told.out and says in told.out
    assert "the best uniform cap" not in told.out
    assert "mlp38: 2 of " in told.err


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(FakeRanks, "interrupt_at", 21)
    assert bucket_size.main(arguments(tmp_path)) == 130
    assert len(document(tmp_path)["visits"]) == 20
    assert "interrupted with 31 visits left" in capsys.readouterr().err
    monkeypatch.setattr(FakeRanks, "interrupt_at", None)
    assert bucket_size.main(arguments(tmp_path)) == 0
    assert FakeRanks.calls == 21 + 31
    assert len(document(tmp_path)["visits"]) == 51
    assert bucket_size.main(arguments(tmp_path)) == 0  # nothing left to measure
    assert FakeRanks.calls == 21 + 31
