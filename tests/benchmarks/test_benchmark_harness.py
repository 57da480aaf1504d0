"""The benchmarks' arithmetic and files: spreads, paired differences, whole files or none."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness
import overhead


def test_spread_of_known_samples():
    found = harness.spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert harness.spread([7.0]) == harness.Spread(7.0, 7.0, 7.0, 1)
    assert found.show(scale=10, digits=1) == "30.0 [20.0, 40.0]"


def test_rounds_visit_each_variant_once_and_differ():
    orders = harness.rounds("abcdef", 20)
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) > 10
    assert orders == harness.rounds("abcdef", 20)


def test_overhead_is_paired_by_round():
    # The machine is twice as slow in the second round; the overhead of "torch" is 3 in both.
    samples = {"local": [10.0, 20.0], "raw": [1.0, 1.0], "torch": [14.0, 24.0], "minddp": [12.0, 22.0]}
    samples["floor"] = [11.5, 21.5]  # half a unit in which the ranks wait for each other
    assert overhead.less(samples, "torch", "local") == [4.0, 4.0]
    assert overhead.less(samples, "torch", "local", "raw") == [3.0, 3.0]
    rows = overhead.summarize(samples, ["torch", "minddp"])
    assert rows["minddp"]["overhead_ratio"] == pytest.approx([1 / 3] * 3)
    assert rows["minddp"]["above_floor_ratio"] == pytest.approx([0.5 / 2.5] * 3)
    assert rows["floor"]["overhead_ratio"] == pytest.approx([0.5 / 3] * 3)
    assert rows["minddp"]["step_ratio"][1] == pytest.approx(17 / 19)


def test_no_ratio_to_an_overhead_that_is_hidden():
    samples = {"local": [10.0, 10.0], "raw": [5.0, 5.0], "torch": [11.0, 12.0], "minddp": [10.5, 11.0]}
    row = overhead.summarize({**samples, "floor": [15.0, 15.0]}, ["torch", "minddp"])["minddp"]
    assert "overhead_ratio" not in row and "above_floor_ratio" not in row


def test_the_interval_holds_the_ratio_of_medians():
    numerator, denominator = [float(1 + i % 5) for i in range(40)], [float(10 + i % 7) for i in range(40)]
    low, ratio, high = overhead.ratio_interval(numerator, denominator)
    assert ratio == statistics.median(numerator) / statistics.median(denominator)
    assert low < ratio < high


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "deep" / "result.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        harness.write_json(path, {"a": object()})
    with pytest.raises(TypeError):
        harness.write_text(path, 3)  # type: ignore[arg-type]
    assert harness.read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_a_file_that_is_no_result_is_named(tmp_path: Path):
    path = tmp_path / "half.json"
    path.write_text('{"a": ')
    with pytest.raises(harness.BenchmarkError, match=r"half.json is not a result file"):
        harness.read_json(path)


def test_arguments_that_contradict_are_refused_before_anything_starts():
    with pytest.raises(harness.BenchmarkError, match="shm does not use the network"):
        harness.Ranks(2, "shm", link="1gbit")
    with pytest.raises(harness.BenchmarkError, match="add --ranks 2"):
        harness.Ranks(1, link="1gbit")
    with pytest.raises(harness.BenchmarkError, match="engine 'mpi' is not one of gloo, nccl, shm"):
        harness.Ranks(2, "mpi")
