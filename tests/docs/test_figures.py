"""The figures of README.md and docs/performance.md are what the commands beside them have stored last."""

from __future__ import annotations

import importlib
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
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
SENTENCES = " ".join(PERFORMANCE.split())
NAMES = {"400 small parameters": "many-small", "67 MB MLP": "mlp67", "ResNet-50": "resnet50"}

sys.path.insert(0, str(ROOT / "benchmarks"))


def table(text: str, heading: str) -> list[list[str]]:
    """The page's rows below the heading that begins like this."""
    after = text[text.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in after.splitlines()[2:]]


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


def assert_rows(rows: list[list[str]], measured: dict[str, Any]) -> None:
    """By variant: milliseconds with quartiles, and the ratio to the baseline with its interval."""
    assert {name for name, *_ in rows} == set(measured)
    for name, milliseconds, ratio in rows:
        step = measured[name]["step"]
        assert_shown(milliseconds, [1e3 * step[key] for key in ("median", "low", "high")])
        low, middle, high = measured[name].get("step_ratio") or (None, None, None)
        assert_shown(ratio, [] if middle is None else [middle, low, high])


def test_steps() -> None:
    measured = overhead()
    assert set(measured) == {(model, ranks) for model in NAMES.values() for ranks in (1, 2)}
    for (model, ranks), found in measured.items():
        rows = table(PERFORMANCE, f"| {model}, {ranks} rank{'s' * (ranks > 1)} | ms | of torch |")
        assert {"torch", "minddp", "floor"} <= {name for name, *_ in rows}
        assert_rows(rows, found)
        if ranks == 1:  # "at the floor, or within two hundredths of it"
            middle, floor = (found[variant]["step_ratio"][1] for variant in ("minddp", "floor"))
            assert round(middle, 2) - round(floor, 2) <= 0.02 + 1e-9


def test_steps_beside_torch_2_15() -> None:
    result = json.loads((RESULTS / "overhead-torch-2.15.json").read_text())
    assert result["machine"]["torch"].startswith("2.15.")
    cases = {case["world_size"]: case["rows"] for case in result["results"]}
    for ranks, title in ((1, "1 rank"), (2, "2 ranks")):
        rows = table(PERFORMANCE, f"| many-small, {title} | ms | of {result['baseline']} |")
        assert len(rows) == 9
        assert_rows(rows, cases[ranks])


def in_the_readme(kind: str) -> dict[str, list[str]]:
    """The rows of the README's table that begin so: what was measured -> the other cells, the command first."""
    rows = [row for row in table(README, "| measured |") if row[0].startswith(kind)]
    return {name: [cells[-1], *cells[:-1]] for name, *cells in rows}


def assert_made_by(command: str, result: dict[str, Any]) -> None:
    """The README shows the command without its arguments; docs/performance.md has them."""
    assert result["command"].startswith(command.strip("`"))


def test_the_readmes_steps_on_one_rank() -> None:
    """Of those on two ranks the README shows none."""
    measured, rows = overhead(), in_the_readme("a step of")
    rows = {name: cells for name, cells in rows.items() if name.endswith(", 1 rank")}
    assert len(rows) == 3
    for name, (command, theirs, ours, ratio) in rows.items():
        model = re.fullmatch(r"a step of (?:a )?(.*), 1 rank", name)[1]  # type: ignore[index]
        found = measured[NAMES[model], 1]
        for cell, variant in ((theirs, "torch"), (ours, "minddp")):
            step = found[variant]["step"]
            assert_shown(cell, [1e3 * step[key] for key in ("median", "low", "high")])
        low, middle, high = found["minddp"]["step_ratio"]
        assert_shown(ratio, [middle, low, high])
        for file in ("overhead.json", "overhead-large.json"):
            assert_made_by(command, json.loads((RESULTS / file).read_text()))


def test_the_readmes_all_reduce() -> None:
    result = json.loads((RESULTS / "shm.json").read_text())
    (found,) = [case["rows"] for case in result["collectives"] if (case["bytes"], case["ranks"]) == (32 * 2**20, 2)]
    ((command, theirs, ours, speedup),) = in_the_readme("an all-reduce of 32 MB").values()
    for cell, variant in ((theirs, "gloo"), (ours, "shm")):
        assert_shown(cell, [1e3 * found[variant]["seconds"][key] for key in ("median", "low", "high")])
    assert_shown(speedup, [found["shm"]["speedup"][key] for key in ("median", "low", "high")])
    assert_made_by(command, result)


def test_the_readmes_bucket_sizes() -> None:
    from sweep import Point

    rows = [cells for name, cells in in_the_readme("a step of").items() if "1 Gbit/s" in name]
    assert len(rows) == 2
    for (command, best, auto, change), model in zip(rows, ("mlp38", "gpt2-small")):
        result, summary = sweep_of(model)
        ours, cap = summary.times[Point("minddp", "auto")], summary.best("minddp")[1]
        for cell, time in ((best, cap), (auto, ours)):
            assert_shown(cell, [1e3 * value for value in (time.median, time.low, time.high)])
        assert_shown(change, [100 * (ours.median / cap.median - 1)])
        assert_made_by(command, result)


def test_the_readmes_gpu() -> None:
    result = json.loads((RESULTS / "gpu-check-c.json").read_text())
    found = result["parts"]["many-small"]["measured"]["beside"]
    ((command, theirs, ours, launches),) = in_the_readme("what the class adds").values()
    for cell, variant in ((theirs, "torch"), (ours, "minddp")):
        assert_shown(cell, [1e3 * found["overhead"][variant]["added"][key] for key in ("median", "low", "high")])
    counts = {name: count["launches"] for name, count in found["launches"].items()}
    assert_shown(launches, [counts["minddp"] - counts["local"], counts["torch"] - counts["local"]])
    assert_made_by(command, result)
    assert "NVIDIA H200, torch 2.11" in result["gpu"] and all(part["ok"] for part in result["parts"].values())


def test_the_readmes_wire() -> None:
    import wire
    from sweep import Sweep

    path = RESULTS / "wire-mlp38-gloo-2ranks-1gbit.json"
    result = json.loads(path.read_text())
    found = {point.key: row for point, row in wire.table(Sweep(path, result["settings"])).items()}
    ((command, theirs, ours, ratio),) = in_the_readme("the 38 MB MLP over that link").values()
    for cell, key in ((theirs, "torch default"), (ours, "minddp-int8 default")):
        step = found[key][0]
        assert_shown(cell, [1e3 * value for value in (step.median, step.low, step.high)])
    to_torchs = found["minddp-int8 default"][1]
    assert_shown(ratio, [to_torchs.median, to_torchs.low, to_torchs.high])
    assert "--models mlp38" in result["command"] and "--link 1gbit" in result["command"]
    assert command == "`python benchmarks/wire.py --link 1gbit`"


RESULT_FILES = ["overhead.json", "overhead-large.json", "overhead-torch-2.15.json", "memory.json", "shm.json"]


@pytest.mark.parametrize("name", RESULT_FILES)
def test_the_command_is_the_one_that_made_it(name: str) -> None:
    command = json.loads((RESULTS / name).read_text())["command"]
    assert command in SENTENCES


def test_memory() -> None:
    measured = json.loads((RESULTS / "memory.json").read_text())["bytes_per_parameter_byte"]
    sentence = PERFORMANCE[PERFORMANCE.index("Bytes of gradients and buckets") :].split("\n\n")[0]
    ours, views, theirs = measured["minddp"], measured["minddp-views"], measured["torch-views"]
    values = [case[state] for case in (ours, views, theirs) for state in ("steady", "zeroed")]
    assert_shown(sentence, values)
    for state in ("steady", "zeroed"):
        assert round(ours[state], 2) == round(measured["torch"][state], 2)


def sweep_of(model: str) -> tuple[dict[str, Any], Any]:
    """The sweep of bucket sizes over 1 Gbit/s: what is stored, and its summary."""
    from bucket_report import summarize
    from sweep import Sweep

    path = RESULTS / f"buckets-{model}-gloo-2ranks-1gbit.json"
    result = json.loads(path.read_text())
    return result, summarize(Sweep(path, result["settings"]))


def test_bucket_sizes() -> None:
    from bucket_report import predicted_seconds
    from sweep import Point

    columns = []
    for model in ("mlp38", "gpt2-small"):
        _, summary = sweep_of(model)
        auto, default, torchs = (
            summary.times[Point(*key)].median
            for key in (("minddp", "auto"), ("minddp", "default"), ("torch", "default"))
        )
        best, torchs_best = summary.best("minddp"), summary.best("torch")
        predicted = predicted_seconds(summary, Point("minddp", "auto"))
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
    rows = [cells[-2:] for cells in table(PERFORMANCE, "|  | MLP, 38 MB |")]
    assert len(rows) == len(columns[0])
    for cells, *values in zip(rows, *columns):
        for cell, value in zip(cells, values):
            assert_shown(cell, [value])


def test_the_simulator() -> None:
    from simulate import Sweep

    sweep = Sweep(json.loads((RESULTS / "simulate-mlp38.json").read_text()))
    errors = sorted(abs(sweep.error(name)) for name in sweep.steps)
    sentence = re.search(r"the default and six sizes, seven choices, within ([\d.]+) %, median ([\d.]+) %", SENTENCES)
    assert sentence is not None and len(errors) == 7
    assert_shown(sentence[1], [100 * errors[-1]])
    assert_shown(sentence[2], [100 * statistics.median(errors)])


def test_shared_memory() -> None:
    measured = json.loads((RESULTS / "shm.json").read_text())["collectives"]
    (rows,) = [found["rows"] for found in measured if found["bytes"] == 32 * 2**20 and found["ranks"] == 2]
    text = r"of 32 MB is ([\d.]+) times as fast as over Gloo. It is ([\d.]+) times as fast where the tensor"
    said = re.search(text, SENTENCES)
    assert said is not None
    for figure, variant in zip(said.groups(), ("shm", "shared"), strict=True):
        assert_shown(figure, [rows[variant]["speedup"]["median"]])


def test_the_page_is_up_to_date() -> None:
    import page

    assert page.PAGE.read_text() == page.page()


def test_one_command_makes_every_result():
    """`make results`: so that none that a page names is left behind."""
    all_results = importlib.import_module("all_results")
    known = {f"python benchmarks/{command}" for command in all_results.COMMANDS.values()}
    given = {path.name: json.loads(path.read_text()).get("command") for path in RESULTS.glob("*.json")}
    assert {name: command for name, command in given.items() if command and command not in known} == {}
    assert all((RESULTS / f"{name}.json").exists() for name in all_results.COMMANDS)
