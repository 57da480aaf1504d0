"""``minddp run``: the program sees what Python's own start shows it.

minddp is a stub here, but for the files that run programs: Pythons that import torch take seconds to start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minddp"

SHOW = """
import inspect, pickle, sys
def show(of_main):
    main = sys.modules["__main__"]
    names = {name: value for name, value in vars(main).items() if name.startswith("__")}
    for name in ("__loader__", "__spec__"):
        names[name] = [type(names[name]).__name__, *(getattr(names[name], key, None) for key in ("name", "path"))]
    names["__builtins__"] = type(names["__builtins__"]).__name__
    code = inspect.currentframe().f_back.f_code.co_filename
    print(sys.argv, sys.path, sorted(names.items()), code, pickle.loads(pickle.dumps(of_main)) is of_main, sep="\\n")
"""
MAIN = """
import atexit, pickle
from show import show
class Mine: pass
show(Mine)
atexit.register(lambda: print(len(pickle.dumps(Mine())) > 0))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs, and in ``stub`` a minddp whose ``install()`` does nothing."""
    root = tmp_path_factory.mktemp("programs")
    cli = root / "stub" / "minddp" / "cli"
    for name in ("bin", "sub", "dir", "pkg", cli):
        (root / name).mkdir(parents=True)
    for path in ("script.py", "dir/__main__.py", "pkg/__main__.py", "pkg/mod.py"):
        (root / path).write_text(MAIN)
    for path in ("show.py", "dir/show.py", "sub/show.py"):
        (root / path).write_text(SHOW)
    (root / "sub" / "link.py").symlink_to("../script.py")
    with zipfile.ZipFile(root / "app.zip", "w") as archive:
        for path in (root / "dir").iterdir():
            archive.write(path, path.name)
    for path in (root / "pkg" / "__init__.py", cli / "__init__.py", cli.parent / "__init__.py"):
        path.touch()
    (root / "bin" / "minddp").write_text("import sys; from minddp.cli.command import main; sys.exit(main())")
    (cli / "install.py").write_text("def install(): pass")
    for path in ("run.py", "cli/run.py", "cli/command.py"):
        (cli.parent / path).symlink_to(PACKAGE / path)
    return root


SCRIPTS = ["script.py a -m", "./script.py", "sub/../script.py", "sub/link.py"]
OTHERS = ["dir", "./dir/", "app.zip", "-m pkg.mod a", "-m pkg"]


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("command", SCRIPTS + OTHERS)
def test_a_program_sees_what_python_shows_it(folder: Path, command: str, safe: str) -> None:
    """By ``python -m`` and by the command that pip makes, whose folder Python puts first into ``sys.path``."""
    path = os.pathsep.join([str(folder / "stub"), *[str(folder)] * bool(safe)])
    started = [
        subprocess.Popen(
            [sys.executable, *words, *command.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": safe},
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in ([], ["-m", "minddp.run"], ["bin/minddp", "run"])
    ]
    pythons, *ours = (process.communicate(timeout=120)[0] for process in started)
    assert ours == [pythons, pythons]
    assert pythons.endswith("True\nTrue\n")
