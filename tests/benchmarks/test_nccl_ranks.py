"""benchmarks/nccl as far as it goes without a GPU. CI runs its cases on the CPU, by `gpu_check.py D E --dry`."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import forked
from tests.conformance import cases

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "nccl"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("many", "world"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import many

    return many


def test_the_cases_are_those_that_are_written(many: ModuleType) -> None:
    """`many.py` lists them in its order without importing them, since minddp need not be built yet."""
    written = {"cases.py": {"collectives"}, "device_cases.py": set()}
    for file, names in written.items():
        for node in ast.parse((FOLDER / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "case" for mark in node.decorator_list):
                names.add(node.name)
    assert sorted(many.CASES) == sorted(written["cases.py"] | written["device_cases.py"])
    assert set(many.ON_DEVICE) == written["device_cases.py"] | {"bf16_hook"}


def test_no_file_imports_another_in_a_circle() -> None:
    """Those in the head and those within functions: `TopologicalSorter` raises where there is a circle."""
    files = {path.stem: list(ast.walk(ast.parse(path.read_text()))) for path in FOLDER.glob("*.py")}
    imported: dict[str, set[str | None]] = {}
    for name, nodes in files.items():
        whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported[name] = whole | {node.module for node in nodes if isinstance(node, ast.ImportFrom)} & set(files)
    order = list(graphlib.TopologicalSorter(imported).static_order())
    assert order.index("here") < order.index("cases") < order.index("device_cases") < order.index("rank")


RANK = """
import json, os, sys, time
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
rank = os.environ["RANK"]
with open(arguments["--answers"], "a") as answers:
    for case in arguments["--cases"].split(","):
        if case == "views":
            time.sleep(60)
        if case == "join" and rank == "1":
            os._exit(3)
        answer = {"case": case, "ok": case != "default", "note": rank, "seconds": 0}
        print(json.dumps(answer), file=answers, flush=True)
"""


def test_a_case_that_hangs_is_ended_alone(
    many: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    import world

    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(world, "HERE", tmp_path)
    files = ["--folder", str(tmp_path / "f"), "--output", str(tmp_path / "out.json")]
    asked = ["--cases", "default,views,no_sync,join,weighted", "--device", "cpu", "--stall", "6", "--limit", "100"]
    assert many.main(["cases", *asked, *files]) == 1
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["passed"] == ["no_sync", "weighted"]
    assert result["failed"] == ["default", "views", "join"]
    assert result["table"] == capsys.readouterr().out.splitlines()
    told = "\n".join(result["table"])
    assert "HUNG   views                    nothing new for 6 s" in told
    assert "rank 0: 0 | rank 1: 1" in told
    assert not world.World.alive


@pytest.mark.long
def test_pytorchs_own_tests_that_are_cut_leave_their_answers(tmp_path: Path) -> None:
    """They run on one device, the telling ones first; the file has each answer at once; SIGTERM leaves no process."""
    output = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "conform.py"), "--device", "cpu", "--jobs", "1", "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "first grads_same_across_ranks_with_no_sync, " in process.stdout.readline()
        assert "test_grads_same_across_ranks_with_no_sync" in process.stdout.readline()
        found = json.loads(output.read_text())
        assert found["passed"] == ["test_grads_same_across_ranks_with_no_sync"] and len(found["not_reached"]) > 50
        started = forked.children_of(process.pid)
        process.terminate()
        assert process.stdout.read() == "stopped: no time left\n"
    assert process.returncode == 124
    assert json.loads(output.read_text())["table"][-1] == "stopped: no time left"
    assert started and not any(map(_runs, started))


def _runs(pid: int) -> bool:
    """Not where it has ended and nobody has asked for its exit code."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_telling_tests_are_pytorchs() -> None:
    names = {case.name.removeprefix("test_") for case in cases.read_passes() if case.world_size == 2}
    assigned = [node for node in ast.parse((FOLDER / "conform.py").read_text()).body if isinstance(node, ast.Assign)]
    (telling,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "TELLING"]
    assert set(ast.literal_eval(telling)) <= names
