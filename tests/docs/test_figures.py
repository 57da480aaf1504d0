"""The README's figures are what the commands beside them have printed last, from ``benchmarks/results``."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
NAMES = {"400 small parameters": "many-small", "67 MB MLP": "mlp67", "ResNet-50": "resnet50"}

sys.path.insert(0, str(ROOT / "benchmarks"))


def table(heading: str) -> list[list[str]]:
    """The README's rows below the heading that begins like this."""
    after = README[README.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in after.splitlines()[2:]]


def numbers(text: str) -> list[str]:
    return re.findall(r"[-+]?\d+(?:\.\d+)?", text)


def assert_shown(cell: str, values: list[float]) -> None:
    """The cell's numbers are the values, each rounded to the digits that are shown."""
    shown = numbers(cell)
    assert len(shown) == len(values), cell
    for text, value in zip(shown, values):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(round(value, digits)), (cell, values)


def overhead() -> dict[tuple[str, int], Any]:
    found = {}
    for name in ("overhead-large.json", "overhead.json"):
        for result in json.loads((RESULTS / name).read_text())["results"]:
            found[result["model"], result["world_size"]] = result["rows"]
    return found


def test_steps() -> None:
    measured, rows = overhead(), table("| step |")
    assert len(rows) >= 5
    for name, *cells in rows:
        model, ranks = re.fullmatch(r"(.*), (\d) ranks?", name).groups()  # type: ignore[union-attr]
        found = measured[NAMES[model], int(ranks)]
        for cell, variant in zip(cells, ("torch", "minddp")):
            step = found[variant]["step"]
            assert_shown(cell, [1e3 * step[key] for key in ("median", "low", "high")])
        low, middle, high = found["minddp"]["step_ratio"]
        assert_shown(cells[2], [middle, low, high])
        floor = found["floor"]["step_ratio"][1]
        assert_shown(cells[3], [floor])
        if name == "400 small parameters, 2 ranks":  # "below it"
            assert middle < found["floor"]["step_ratio"][1]
        if ranks == "1":  # "at the floor, or within two hundredths of it"
            assert round(middle, 2) - round(floor, 2) <= 0.02 + 1e-9


def test_steps_beside_torch_2_15() -> None:
    result = json.loads((RESULTS / "overhead-torch-2.15.json").read_text())
    assert result["machine"]["torch"].startswith("2.15.")
    measured = [{case["world_size"]: case["rows"] for case in result["results"]}[ranks] for ranks in (1, 2)]
    rows = table("| torch 2.15 |")
    assert len(rows) == 7
    for name, *cells in rows:
        variant = re.search(r"`(.*)`", name).group(1)  # type: ignore[union-attr]
        for cell, found in zip(cells, measured):
            if variant == result["baseline"]:
                step = found[variant]["step"]
                assert_shown(cell, [1e3 * step[key] for key in ("median", "low", "high")])
            else:
                low, middle, high = found[variant]["step_ratio"]
                assert_shown(cell, [middle, low, high])


RESULT_FILES = ["overhead.json", "overhead-large.json", "overhead-torch-2.15.json", "memory.json", "shm.json"]


@pytest.mark.parametrize("name", RESULT_FILES)
def test_the_command_is_the_one_that_made_it(name: str) -> None:
    command = json.loads((RESULTS / name).read_text())["command"]
    assert command in " ".join(README.split())


def test_memory() -> None:
    measured = json.loads((RESULTS / "memory.json").read_text())["bytes_per_parameter_byte"]
    paragraph = README[README.index("Memory, in bytes of gradients") :].split("\n\n")[0]
    sentence = re.sub(r"\(.*", "", paragraph.replace("\n", " ")).replace("67 MB", "")
    ours, views, theirs = measured["minddp"], measured["minddp-views"], measured["torch-views"]
    values = [case[state] for case in (ours, views, theirs) for state in ("steady", "zeroed")]
    assert_shown(sentence, values)
    for state in ("steady", "zeroed"):
        assert round(ours[state], 2) == round(measured["torch"][state], 2)


def test_bucket_sizes() -> None:
    from bucket_report import _predicted_seconds, summarize
    from sweep import Point, Sweep

    columns = []
    for model in ("mlp38", "gpt2-small"):
        path = RESULTS / f"buckets-{model}-gloo-2ranks-1gbit.json"
        summary = summarize(Sweep(path, json.loads(path.read_text())["settings"]))
        auto, default, torchs = (
            summary.times[Point(*key)].median
            for key in (("minddp", "auto"), ("minddp", "default"), ("torch", "default"))
        )
        best, torchs_best = summary.best("minddp"), summary.best("torch")
        predicted = _predicted_seconds(summary, Point("minddp", "auto"))
        assert best is not None and torchs_best is not None and predicted is not None
        pairs = [
            (auto, best[1].median),
            (auto, torchs_best[1].median),
            (auto, summary.times[Point("minddp", 25.0)].median),
            (auto, torchs),
            (default, torchs),
            (predicted, auto),
        ]
        columns.append([100 * (a / b - 1) for a, b in pairs])
    rows = [cells[-2:] for cells in table("| | MLP, 38 MB |")]
    assert len(rows) == len(columns[0])
    for cells, *values in zip(rows, *columns):
        for cell, value in zip(cells, values):
            assert_shown(cell, [value])


def test_the_simulator() -> None:
    from simulate import Sweep

    sweep = Sweep(json.loads((RESULTS / "simulate-mlp38.json").read_text()))
    errors = sorted(abs(sweep.error(name)) for name in sweep.steps)
    sentence = re.search(r"a sweep of seven bucket sizes within ([\d.]+) %, median ([\d.]+) %", README)
    assert sentence is not None and len(errors) == 7
    assert_shown(sentence[1], [100 * errors[-1]])
    assert_shown(sentence[2], [100 * statistics.median(errors)])


def test_shared_memory() -> None:
    measured = json.loads((RESULTS / "shm.json").read_text())["collectives"]
    (rows,) = [found["rows"] for found in measured if found["bytes"] == 32 * 2**20 and found["ranks"] == 2]
    said = re.search(r"an all-reduce of 32 MB: ([\d.]+) times as fast, ([\d.]+) times where the tensor", README)
    assert said is not None
    for figure, variant in zip(said.groups(), ("shm", "shared"), strict=True):
        assert_shown(figure, [rows[variant]["speedup"]["median"]])


def test_the_page_is_up_to_date() -> None:
    import page

    assert page.PAGE.read_text() == page.page()
