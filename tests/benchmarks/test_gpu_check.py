"""benchmarks/gpu_check.py as far as it goes without a GPU: its plan, its limits, going on where it stopped."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

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
    for name in ("build", "memcheck", "late", "--ranks 2", "capture", "at most", "trace-minddp.json.gz", "_C*.so"):
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


def test_an_unbuilt_copy_builds_first_and_leaves_one_folder(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the next machine, another unbuilt copy, the extension and what has passed come from that folder."""
    ran: list[str] = []

    def runner(command: list[str], environment: dict[str, str], *_: Any, **options: Any) -> tuple[int, str]:
        ran.append(command[2] if command[1].endswith("gpu_measure.py") else command[0])
        assert str(check.TOOLS) in environment["PYTHONPATH"].split(":")
        if ran[-1] == "build" and not (check.PACKAGE / "_build.json").exists():
            (check.PACKAGE / "_C.cpython-312-x86_64-linux-gnu.so").write_text("built here")
            (check.PACKAGE / "_build.json").write_text("{}")
        if command[0] == "compute-sanitizer":
            assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        return 0, "1 passed in 1s"

    monkeypatch.setattr(check, "_run", runner)
    monkeypatch.setattr(check, "TOOLS", tmp_path / "tools")
    folders = []
    for number in range(2):
        monkeypatch.setattr(check, "PACKAGE", tmp_path / f"copy{number}")
        check.PACKAGE.mkdir()
        folders.append(tmp_path / f"out{number}")
        carry = folders[0] if number else None
        assert check.run_call("A", "a GPU", folders[-1] / "gpu-check-a.json", again=False, carry=carry)
        assert sorted(path.name for path in folders[-1].iterdir()) == [
            "_C.cpython-312-x86_64-linux-gnu.so", "_build.json", "gpu-check-a.json", "gpu-check-a.txt",
        ]  # fmt: skip
    assert ran[0] == "build" and ran.count("build") == 2
    assert len(ran) == len(check.CALLS["A"]) + 1, "what has passed is not done again on the next machine"
    assert (tmp_path / "copy1" / "_C.cpython-312-x86_64-linux-gnu.so").read_text() == "built here"


def test_a_build_that_is_current_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what the files hold: those of a copy are all new."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_measure

    record = {"torch": torch.__version__, "cuda": None}
    commands = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        (tmp_path / "minddp" / f"_C{suffix}").touch()
        gpu_measure.RECORD.write_text(json.dumps(record))

    (tmp_path / "minddp").mkdir()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(gpu_measure, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_measure, "RECORD", tmp_path / "minddp" / "_build.json")
    monkeypatch.setattr(gpu_measure.subprocess, "run", run)
    gpu_measure.build("cpu")
    gpu_measure.build("cpu")
    assert len(commands) == 1
    (tmp_path / "csrc" / "new.cpp").touch()
    (tmp_path / "csrc" / "new.cpp").write_text("int x;")
    gpu_measure.build("cpu")
    assert len(commands) == 2
    gpu_measure.build("cuda")  # one without CUDA does not do there
    assert len(commands) == 3


def test_the_models_are_of_the_sizes_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plain_models

    layers = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
    with torch.device("meta"), monkeypatch.context() as patch:
        for layer in layers:  # weights that nobody looks at
            patch.setattr(layer, "reset_parameters", lambda self: None)
        built = [plain_models.resnet50(224, 1), plain_models.gpt2(1024, 1), plain_models.layers_7b(4, 64, 1)]
        millions = [round(sum(p.numel() for p in module.parameters()) / 1e6, 1) for module, _ in built]
    assert millions == [25.6, 124.4, 809.5]
    assert plain_models._Bottleneck(8, 4, 2)(torch.randn(2, 8, 6, 6)).shape == (2, 16, 3, 3)
    assert plain_models._Gpt2(50, 16, 8, 2, 2)(torch.arange(6).view(2, 3)).shape == (2, 3, 50)
    assert plain_models._Block(16, 32, 2, gated=True)(torch.randn(2, 3, 16)).isfinite().all()


def test_a_part_that_hangs_is_killed_with_what_it_started(check: ModuleType) -> None:
    begin = time.monotonic()
    code, _ = check._run(["/bin/sh", "-c", "sleep 600 & sleep 600"], {}, 0.5)
    assert code is None
    assert time.monotonic() - begin < 300


def test_ranks_end_with_who_has_started_them(check: ModuleType, tmp_path: Path) -> None:
    """Whose time is up gets a signal, and time to end ranks that are in sessions of their own."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path)!r}, 'ended').touch(), sys.exit()))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    code_, output = check._run([sys.executable, "-c", code], {}, 5, show=True)
    assert code_ is None and output == "ready\n"
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    "gpu, gpus, said",
    [
        ("", 0, "3 ranks over Gloo on the CPU"),
        ("NVIDIA H200, torch 2.11.0", 1, "3 ranks over NCCL on one GPU, as 3 hosts: NVIDIA H200, torch 2.11.0"),
        ("NVIDIA H200, torch 2.11.0", 3, "3 ranks over NCCL on 3 GPUs: NVIDIA H200, torch 2.11.0"),
    ],
)
def test_the_first_line_says_where_the_ranks_are(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, gpu: str, gpus: int, said: str
) -> None:
    """Ranks that share a GPU get host ids; `world.py` knows both ways."""
    ways: list[str] = []

    def run_part(part: Any, device: str, seconds: float, output: Path, way: str = "") -> dict[str, Any]:
        ways.append(way)
        return {"ok": True, "seconds": 1.0}

    monkeypatch.setattr(check, "run_part", run_part)
    monkeypatch.setattr(check, "PACKAGE", tmp_path)
    assert check.run_call("3ranks", gpu, tmp_path / "gpu-check-3ranks.json", again=False, gpus=gpus)
    assert capsys.readouterr().out.splitlines()[0] == f"gpu-check 3ranks on {said}"
    assert set(ways) == {"devices" if gpus == 3 else "hostid"}


def test_the_way_that_call_d_has_found_is_taken_by_call_e(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways: dict[str, list[str]] = {"D": [], "E": []}

    def run_part(part: Any, device: str, seconds: float, output: Path, way: str = "") -> dict[str, Any]:
        ways[output.stem[-1].upper()].append(way)
        measured = {"way": "hostid-nocumem"} if part.command == check.CONTROL else {}
        return {"ok": True, "seconds": 1.0, "measured": measured}

    monkeypatch.setattr(check, "run_part", run_part)
    monkeypatch.setattr(check, "PACKAGE", tmp_path)
    check.run_call("D", "a GPU", tmp_path / "out" / "gpu-check-d.json", again=False)
    check.run_call("E", "a GPU", tmp_path / "out2" / "gpu-check-e.json", again=False, carry=tmp_path / "out")
    assert ways["D"][2:] == ["hostid-nocumem"] * 3
    assert ways["E"] == ["hostid-nocumem"] * 5


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

    def run_part(part: Any, device: str, seconds: float, output: Path, way: str = "") -> dict[str, Any]:
        ran.append(part.what)
        return {"ok": True, "seconds": 0.0}

    monkeypatch.setattr(check, "run_part", run_part)
    check.run_call("A", "a GPU", tmp_path / "A.json", again=False)
    whole = len(ran)
    check.run_call("A", "a GPU", tmp_path / "A.json", again=False)
    assert len(ran) == whole + 1  # the build, which may be another machine's
    monkeypatch.setattr(check, "sources", lambda: "others")
    check.run_call("A", "a GPU", tmp_path / "A.json", again=False)
    assert len(ran) == 2 * whole + 1
