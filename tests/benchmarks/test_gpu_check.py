"""benchmarks/gpu_check.py as far as it goes without a GPU: its plan, its limits, going on where it stopped."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_every_call_fits_into_eight_minutes(check: ModuleType) -> None:
    assert list(check.CALLS) == ["A", "B", "C"]
    for parts in check.CALLS.values():
        assert sum(part.seconds for part in parts.values()) <= check.CALL_SECONDS == 480


def test_every_part_names_what_exists(check: ModuleType) -> None:
    """Files, tests and, of ``-k``, a test that has the word."""
    for parts in check.CALLS.values():
        for part in parts.values():
            if part.tool == "measure":
                assert f'"{part.command[0]}"' in (ROOT / "benchmarks" / "gpu_measure.py").read_text()
                continue
            file, _, test = part.command[0].partition("::")
            tree = ast.parse((ROOT / file).read_text())
            names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            assert not test or test in names
            words = part.command[2] if "-k" in part.command else ""
            for word in words.replace("(", " ").replace(")", " ").split():
                if word not in ("and", "or", "gpu"):
                    assert any(name.startswith("test_") and word in name for name in names), (part.command, word)


def test_it_starts_where_minddp_is_not_built() -> None:
    """``--plan`` names each part; neither minddp nor torch is imported."""
    code = f"import runpy, sys; sys.argv = ['gpu_check.py', '--plan']\ntry: runpy.run_path({str(SCRIPT)!r}, " \
           "run_name='__main__')\nexcept SystemExit: pass\nassert not {'minddp', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    for name in ("build", "memcheck", "late", "capture", "bandwidth", "at most"):
        assert name in done.stdout


def _parts(check: ModuleType, **commands: str) -> dict[str, Any]:
    return {name: check.Part(name, 20, (code,), "python", on_cpu=True) for name, code in commands.items()}


def test_it_goes_on_where_it_stopped(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run_part(part: Any, device: str, seconds: float) -> dict[str, Any]:
        ran.append(part.what)
        return {"ok": part.what != "second" or len(ran) > 3, "seconds": 1.0, "error": "lines\nits last line"}

    monkeypatch.setattr(check, "run_part", run_part)
    monkeypatch.setitem(check.CALLS, "A", _parts(check, first="", second="", third=""))
    output = tmp_path / "a.json"
    assert not check.run_call("A", "cpu", output, again=False)
    assert "FAILED second" in output.with_suffix(".txt").read_text()
    assert check.run_call("A", "cpu", output, again=False)
    assert ran == ["first", "second", "third", "second"]
    assert all(part["ok"] for part in json.loads(output.read_text())["parts"].values())


def test_a_part_that_hangs_is_killed_with_what_it_started(check: ModuleType) -> None:
    begin = time.monotonic()
    code, _ = check._run(["/bin/sh", "-c", "sleep 60 & sleep 60"], {}, 0.5)
    assert code is None
    assert time.monotonic() - begin < 20


def test_a_tool_that_is_missing_is_told(check: ModuleType) -> None:
    code, output = check._run(["no-such-tool-here"], {}, 5)
    assert code == 127
    assert "no-such-tool-here is not installed" in output


def test_the_sanitizer_has_the_last_line(check: ModuleType) -> None:
    """What pytest says stands before it."""
    tests = "..s [100%]\n2 passed, 1 skipped in 3.2s\n"
    assert check.closing(f"{tests}========= ERROR SUMMARY: 0 errors\n") == "2 passed, 1 skipped in 3.2s"
    assert check.closing("1 failed, 2 passed in 1s\n========= ERROR SUMMARY: 1 error\n").startswith("1 failed")
    assert check.closing("no tests ran in 0.1s") == "no tests ran in 0.1s"


def test_what_other_sources_passed_is_run_again(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def run_part(part: Any, device: str, seconds: float) -> dict[str, Any]:
        ran.append(part.what)
        return {"ok": True, "seconds": 0.0}

    monkeypatch.setattr(check, "run_part", run_part)
    check.run_call("A", "cuda", tmp_path / "A.json", again=False)
    whole = len(ran)
    check.run_call("A", "cuda", tmp_path / "A.json", again=False)
    assert len(ran) == whole + 1  # the build, which may be another machine's
    monkeypatch.setattr(check, "sources", lambda: "others")
    check.run_call("A", "cuda", tmp_path / "A.json", again=False)
    assert len(ran) == 2 * whole + 1
