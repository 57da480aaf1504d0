"""benchmarks/gpu_check.py as far as it goes without a GPU: its plan, its limits, going on where it stopped."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "gpu_check", raising=False)
    return importlib.import_module("gpu_check")


def test_every_call_fits_into_its_time(check: ModuleType) -> None:
    """A with its build; another one builds only where it was carried nothing, and then goes on once more."""
    assert check.CALL_SECONDS == {"A": 480, "B": 480, "C": 480, "D": 300, "E": 270}
    assert list(check.CALL_SECONDS) == list(check.CALLS)
    for call in [*check.CALLS, "3ranks"]:
        parts = check.parts_of(call)
        assert next(iter(parts)) == "build", "a call may be the first on a machine"
        seconds = sum(part.seconds for name, part in parts.items() if call == "A" or name != "build")
        assert seconds <= check.CALL_SECONDS.get(call, 180)
        assert len(check.files(call)) <= check.MOST_FILES == 8


def test_every_part_names_what_exists(check: ModuleType) -> None:
    """Files, tests and, of ``-k``, a test that has the word."""
    for parts in check.CALLS.values():
        for part in parts.values():
            if part.tool == "measure":
                assert f'"{part.command[0]}"' in (ROOT / "benchmarks" / "gpu_measure.py").read_text()
                continue
            if part.tool == "ranks":
                assert (ROOT / "benchmarks" / "nccl" / f"{part.command[0]}.py").exists()
                continue
            chosen = part.command.index("-k") if "-k" in part.command else len(part.command)
            names: list[str] = []
            for command in part.command[:chosen]:
                file, _, test = command.partition("::")
                tree = ast.parse((ROOT / file).read_text())
                names += [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
                assert not test or test in names
            words = "".join(part.command[chosen + 1 : chosen + 2])
            for word in words.replace("(", " ").replace(")", " ").split():
                if word not in ("and", "or", "gpu"):
                    assert any(name.startswith("test_") and word in name for name in names), (part.command, word)


def test_it_starts_where_minddp_is_not_built() -> None:
    """``--plan`` names each part; neither minddp nor torch is imported."""
    code = (
        f"import runpy, sys; sys.argv = ['gpu_check.py', '--plan']\ntry: runpy.run_path({str(SCRIPT)!r}, "
        "run_name='__main__')\nexcept SystemExit: pass\nassert not {'minddp', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    for name in ("build", "memcheck", "late", "--ranks 2", "capture", "at most", "trace-minddp.json.gz", "_*.so"):
        assert name in done.stdout


def _parts(check: ModuleType, **commands: str) -> dict[str, Any]:
    return {name: check.Part(name, 20, (code,), "python", on_cpu=True) for name, code in commands.items()}


def test_it_goes_on_where_it_stopped(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run_part(part: Any, device: str, seconds: float, output: Path, way: str = "") -> dict[str, Any]:
        ran.append(part.what)
        return {"ok": part.what != "second" or len(ran) > 3, "seconds": 1.0, "error": "lines\nits last line"}

    monkeypatch.setattr(check, "run_part", run_part)
    monkeypatch.setitem(check.CALLS, "A", _parts(check, first="", second="", third=""))
    output = tmp_path / "a.json"
    assert not check.run_call("A", "", output, again=False)
    assert "FAILED second" in output.with_suffix(".txt").read_text()
    assert check.run_call("A", "", output, again=False)
    assert ran == ["first", "second", "third", "second"]
    assert all(part["ok"] for part in json.loads(output.read_text())["parts"].values())


def test_all_of_d_and_e_runs_dry(check: ModuleType) -> None:
    assert all(part.on_cpu for call in "DE" for part in check.CALLS[call].values())


@pytest.mark.parametrize("sudden", [False, True])
def test_a_part_that_is_cut_leaves_what_it_has(
    sudden: bool, check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its time is up, or this process is ended; where that is sudden, the part's own file stays."""
    code = "import json, sys, time; open(sys.argv[1], 'w').write(json.dumps({'found': 3})); time.sleep(600)"
    left = tmp_path / "gpu-check-d-unfinished.json"
    monkeypatch.setattr(check, "_command", lambda *_: [sys.executable, "-c", code, str(left)])
    monkeypatch.setitem(check.CALLS, "D", {"part": check._ranks("it waits", 20, "many", "cases")})
    stop = threading.Timer(0.01, lambda: (_wait_for(left), check.STOP.set()))
    stop.start()
    if sudden:
        monkeypatch.setattr(check.json, "loads", _killed)
        with pytest.raises(KeyboardInterrupt):
            check.run_call("D", "", tmp_path / "gpu-check-d.json", again=False, commit="abc")
        monkeypatch.undo()
        assert json.loads(left.read_text()) == {"found": 3}
        return
    assert not check.run_call("D", "", tmp_path / "gpu-check-d.json", again=False, commit="abc")
    result = json.loads((tmp_path / "gpu-check-d.json").read_text())
    assert result["commit"] == "abc" and result["parts"]["part"]["measured"] == {"found": 3}
    assert result["parts"]["part"]["error"] == "stopped" and not left.exists()


def _wait_for(path: Path) -> None:
    while not path.exists() or not path.read_text():
        time.sleep(0.01)


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_results_name_a_commit_that_holds_all(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provenance = check.provenance
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "RESULTS", results)

    def why(path: Path, told: str = "") -> str:
        provenance.commit.cache_clear()
        return str(provenance.why_not(path, told))

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)

    results.mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "is no clone of git" in why(results / "a.json")
    assert not why(results / "a.json", "abc") and not why(tmp_path / "a.json")
    (results.parent / "script.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (results / "a.json").write_text("1")
    assert not why(results / "b.json") and len(provenance.commit()) >= 7
    (results.parent / "another.py").write_text("1")
    assert "has changes that no commit holds" in why(results) and why(results / "a.json", "abc")
    assert not why(tmp_path / "a.json")
