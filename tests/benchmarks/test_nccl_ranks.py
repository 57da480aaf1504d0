"""benchmarks/nccl as far as it goes without a GPU. CI runs its cases on the CPU, by `gpu_check.py --ranks 2`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def test_pytorchs_own_tests_run_on_one_device(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "conform.py"), "--device", "cpu", "-k", "undefined_grad_parity"]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    assert json.loads(output.read_text())["passed"]
