"""Every script of benchmarks/ starts, and the numbers that README quotes are paired by round."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "parse_args" in path.read_text()]

sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402
from result_json import as_json  # noqa: E402


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.stem)
def test_a_script_names_its_options(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {script.name} ")


def test_overhead_is_paired_by_round() -> None:
    # The machine is twice as slow in the second round; the overhead of "torch" is 3 in both.
    samples = {"local": [10.0, 20.0], "raw": [1.0, 1.0], "torch": [14.0, 24.0], "minddp": [12.0, 22.0]}
    samples["floor"] = [11.5, 21.5]  # half a unit in which the ranks wait for each other
    assert overhead.less(samples, "torch", "local", "raw") == [3.0, 3.0]
    row = overhead.summarize(samples, ["torch", "minddp"])["minddp"]
    assert row["overhead_ratio"] == pytest.approx([1 / 3] * 3)
    assert row["above_floor_ratio"] == pytest.approx([0.5 / 2.5] * 3)
    assert row["step_ratio"][1] == pytest.approx(17 / 19)


def test_arrays_of_results_stand_on_one_line() -> None:
    """Each stored result is as its writer writes it today, and all of them together stay readable as differences."""
    found = {
        "short": {"a": 1},
        "numbers": list(range(99)),
        "rows": [{"a": [1.5]}, {"b": "c"}],
        "long": {"x" * 99: [2, 3]},
    }
    assert as_json(found).splitlines() == [
        "{", ' "short": {"a": 1},', f' "numbers": {list(range(99))},', ' "rows": [{"a": [1.5]}, {"b": "c"}],',
        ' "long": {"' + "x" * 99 + '": [2, 3]}', "}",
    ]  # fmt: skip
    assert json.loads(as_json(found)) == found
    assert as_json([{"text": "y" * 120}, {"a": 1}]).count("\n") == 3
    texts = {path.name: path.read_text() for path in (BENCHMARKS / "results").glob("*.json")}
    assert [name for name, text in texts.items() if text != as_json(json.loads(text)) + "\n"] == []
    assert sum(text.count("\n") for text in texts.values()) <= 3000
