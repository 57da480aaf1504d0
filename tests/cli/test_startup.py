"""The file that Pythons run when a program with minddp has started them; torch and minddp are stubs here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STARTUP = Path(__file__).resolve().parents[2] / "minddp" / "cli" / "startup" / "sitecustomize.py"
SHOW = (
    "import sys; print([x for x in [*sys.modules, *sys.path] if x in ('torch', 'minddp') or x.endswith('startup')]); "
)
# The Python of these tests may find minddp by itself.
SHOW += (
    "import os; sys.path[:] = [x for x in sys.path if not os.path.exists(os.path.join(x, 'minddp', '__init__.py'))]; "
)
MINDDP = "import torch\ndef install(): print('installed with', torch.name)\nprint('minddp is complete')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``others`` has torch; ``minddp`` beside it is on no path but the start-up file's own."""
    startup = tmp_path / "root" / "minddp" / "cli" / "startup"
    startup.mkdir(parents=True)
    shutil.copy(STARTUP, startup)
    (tmp_path / "root" / "minddp" / "__init__.py").write_text(MINDDP)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "torch.py").write_text("name = 'torch'\nprint('torch is complete')\n")
    return tmp_path


def run(folder: Path, program: str, reached: bool = True) -> tuple[list[str], str]:
    """What the program writes to stdout and stderr."""
    path = [str(folder / "root" / "minddp" / "cli" / "startup")] * reached + [str(folder / "others")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), ended.stderr


NOTHING_YET = "[]"


def test_minddp_comes_after_torch(folder: Path) -> None:
    show_root = "print([p for p in sys.path if p.endswith('root')])"
    seen, errors = run(folder, SHOW + f"import torch, torch, importlib; importlib.reload(torch); {show_root}")
    complete = "torch is complete"
    assert seen == [NOTHING_YET, complete, "minddp is complete", "installed with torch", complete, "[]"]
    assert not errors


def test_a_program_that_imports_minddp_first(folder: Path) -> None:
    seen, errors = run(folder, SHOW + "import minddp, torch")
    assert seen == [NOTHING_YET, "torch is complete", "minddp is complete", "installed with torch"]
    assert not errors


@pytest.mark.parametrize(
    "minddp, warning",
    [("raise ImportError('of another torch')", ""), ("1 / 0", "has not reached this process: Zero")],
)
def test_a_python_that_cannot_load_minddp(folder: Path, minddp: str, warning: str) -> None:
    """It goes on: silently if minddp is not for it."""
    (folder / "root" / "minddp" / "__init__.py").write_text(minddp)
    seen, errors = run(folder, SHOW + "import torch; print(torch.name)")
    assert seen == [NOTHING_YET, "torch is complete", "torch"]
    assert warning in errors and bool(warning) == bool(errors)


def test_a_program_that_only_looks_for_torch(folder: Path) -> None:
    look = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    assert run(folder, SHOW + look) == ([NOTHING_YET, "True"], "")


TEXTS = [None, "import sys; print('theirs', sys.modules[__name__].__file__)", "import nowhere", "1 / 0"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_next_sitecustomize_runs_as_without_minddp(folder: Path, text: str | None) -> None:
    program = """
import sys
print(sys.path)
try:
    import sitecustomize
    print(sitecustomize.__file__)
except Exception as error:
    print(error, getattr(error, "name", None))
"""
    if text:
        (folder / "others" / "sitecustomize.py").write_text(text)
    assert run(folder, program) == run(folder, program, reached=False)
