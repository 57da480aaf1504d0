"""The bucket benchmark without ranks: what it visits, how it goes on after an interrupt, what it reports."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bucket_report
import bucket_size
import sweep as sweeping
from harness import BenchmarkError
from sweep import Point, Sweep
from variants import group_by_cap

CAPS = "1,4,25"
MEASURED = {"local": 0.200, "raw": 0.300, "naive": 0.600, "flat": 0.550, "per-parameter": 0.450}
BY_CAP = {1.0: 0.400, 4.0: 0.430, 25.0: 0.500, "default": 0.510, "auto": 0.390}


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
        answer = {"bucket_bytes": [1 << 20, 3 << 20], "plan": None}
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
    # local, 3 raw, minddp with 3 caps, default and auto, torch with 3 and default, 3 without buckets
    assert len(points) == 16
    assert sorted((v["round"], v["point"]) for v in visits) == sorted((r, p) for r in range(3) for p in points)
    out = capsys.readouterr().out
    assert "minddp: the best uniform cap is 1 MiB, 400.0 ms; the default takes 510.0 ms (+27.5%" in out
    assert 'minddp "auto": 390.0 ms with 2 buckets, -2.5% against the best uniform cap, -23.5%' in out
    assert "torch: the best uniform cap is 1 MiB, 440.0 ms" in out


def test_the_files_hold_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    bucket_size.main(arguments(tmp_path))
    suffixes = {path.suffix for path in tmp_path.iterdir()}
    assert suffixes == {".json", ".csv", ".svg", ".png", ".html"}
    rows = list(csv.DictReader((tmp_path / "buckets-mlp38-gloo-2ranks.csv").open()))
    assert len(rows) == 16 * 3 * 3
    assert {float(r["seconds"]) for r in rows if (r["variant"], r["bucket_cap_mb"]) == ("torch", "4.0")} == {0.473}
    page = (tmp_path / "buckets-mlp38-gloo-2ranks.html").read_text()
    assert "<svg" in page
    assert "src=" not in page  # self-contained
    assert "430.0 [430.0, 430.0]" in page


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(FakeRanks, "interrupt_at", 21)
    assert bucket_size.main(arguments(tmp_path)) == 130
    assert len(document(tmp_path)["visits"]) == 20
    assert "interrupted with 28 visits left" in capsys.readouterr().err
    monkeypatch.setattr(FakeRanks, "interrupt_at", None)
    assert bucket_size.main(arguments(tmp_path)) == 0
    assert FakeRanks.calls == 21 + 28
    assert len(document(tmp_path)["visits"]) == 48
    assert bucket_size.main(arguments(tmp_path)) == 0  # nothing left to measure
    assert FakeRanks.calls == 21 + 28


def test_other_settings_do_not_mix_into_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    bucket_size.main(arguments(tmp_path, "--impl", "torch"))
    with pytest.raises(BenchmarkError, match=r"other settings \(steps 3 -> 9\): give --fresh"):
        bucket_size.main(arguments(tmp_path, "--impl", "torch", "--steps", "9"))
    bucket_size.main(arguments(tmp_path, "--impl", "torch", "--steps", "9", "--fresh"))
    assert all(len(visit["seconds"]) == 9 for visit in document(tmp_path)["visits"])


def test_the_plan_that_auto_found_is_used_again(tmp_path, monkeypatch):
    plans = []

    def run(self: FakeRanks, fn: Any, engine: str, model: str, point: Point, steps: int, plan: Any) -> Any:
        plans.append(plan)
        return [{"seconds": [0.1] * steps, "bucket_bytes": [8], "plan": "the plan"}] * 2

    monkeypatch.setattr(FakeRanks, "run", run)
    settings = {"model": "m", "engine": "gloo", "ranks": 2, "link": None, "threads": 1, "steps": 2}
    Sweep(tmp_path / "s.json", settings).run([Point("minddp", "auto")], 2)
    Sweep(tmp_path / "s.json", settings).run([Point("minddp", "auto")], 3)
    assert plans == [None, "the plan", "the plan"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--impl", "horovod"], "--impl horovod: known are minddp, torch, naive, flat, per-parameter"),
        (["--models", "vgg"], "--models vgg: known are many-small"),
        (["--caps", "0,1"], r"--caps must be above 0 \(MiB\)"),
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
    ],
)
def test_bad_arguments_are_named(words, message):
    with pytest.raises(BenchmarkError, match=message):
        bucket_size.parse(words)


def test_nothing_measured_is_said(tmp_path):
    settings = {"model": "m", "engine": "gloo", "ranks": 2, "link": None, "threads": 1, "steps": 2}
    with pytest.raises(BenchmarkError, match="nothing has been measured yet"):
        bucket_report.summarize(Sweep(tmp_path / "s.json", settings))


def test_uniform_buckets_fill_from_the_last_parameter():
    mib = 1 << 20
    assert group_by_cap([mib, 2 * mib, mib // 2, mib // 2], 1) == [[3, 2], [1], [0]]
    assert group_by_cap([mib // 4, mib], 1) == [[1], [0]]
    assert group_by_cap([1, 1, 1], 0) == [[2], [1], [0]]
    assert group_by_cap([1, 1, 1], float("inf")) == [[2, 1, 0]]
