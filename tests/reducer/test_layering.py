"""Holds csrc to its shape: dependencies point down only.

``csrc/README.md`` shows the order to a reader; this table holds it. A new unit is added to both.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

PATH = CSRC / "reducer"

# Lowest first: a unit may include those before it. `bindings` is not part of the reading path.
LAYERS = [
    "wait",
    "bucket",
    "forwards",
    "grad_hooks",
    "iteration",
    "grad_states",
    "used_map",
    "state",
    "reducer",
    "between_iterations",
    "bindings_comm_hook",
    "bindings",
]
BINDINGS = {"bindings_comm_hook", "bindings"}
PURE = {"wait"}
CASES = {"wait", "bucket", "grad_hooks", "state"}  # what a case may include of the path
# What each folder beside the path may include of the others.
FOLDERS = {
    "cases": {"support"},
    "support": set(),
    "cpu": {"support", "cuda"},
    "cuda": {"support"},
    "transport": {"support"},
    "shm": {"cpu", "support"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def units() -> dict[str, list[Path]]:
    """The reading path's files, in csrc/reducer, and the bindings', in csrc, by unit."""
    files: dict[str, list[Path]] = {}
    for path in (p for folder in (PATH, CSRC) for ending in ("*.h", "*.cpp") for p in sorted(folder.glob(ending))):
        files.setdefault(path.stem, []).append(path)
    return files


def includes(path: Path) -> list[Path]:
    """The files of csrc that a file includes by a quoted name: relative to its folder, or to csrc."""
    names = INCLUDE.findall(path.read_text())
    found = [next((p for p in ((path.parent / name).resolve(), CSRC / name) if p.exists()), None) for name in names]
    assert None not in found, f"{path.name} includes what is not there: {names}"
    return [p for p in found if p is not None]


def included_units(path: Path) -> set[str]:
    return {target.stem for target in includes(path) if target.parent in (CSRC, PATH)}


def test_every_unit_has_a_layer() -> None:
    assert sorted(units()) == sorted(LAYERS)


@pytest.mark.parametrize("unit", LAYERS)
def test_dependencies_point_down(unit: str) -> None:
    allowed = set(LAYERS[: LAYERS.index(unit) + 1])
    for path in units()[unit]:
        assert included_units(path) <= allowed, path.name


def test_nothing_but_the_bindings_includes_the_reducer() -> None:
    users = {unit for unit, paths in units().items() for path in paths if "reducer" in included_units(path)}
    assert users <= {"reducer", "between_iterations"} | BINDINGS


def test_subfolders_stand_on_pure_units() -> None:
    """cpu/, cuda/, shm/ and transport/ know nothing of buckets or the reducer; cases/ know nothing of the reducer."""
    for path in CSRC.glob("*/*"):
        if path.parent != PATH and path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            allowed = CASES if path.parent.name == "cases" else PURE
            assert included_units(path) <= allowed, path.relative_to(CSRC)


def test_the_core_knows_no_case() -> None:
    """Only :file:`between_iterations.cpp`, where cases are made, includes one; and the bindings."""
    users = {path.stem for paths in units().values() for path in paths for target in includes(path)
             if target.parent.name == "cases"}  # fmt: skip
    assert users - BINDINGS == {"between_iterations"}


def test_folders_include_what_they_may() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == {"reducer", *FOLDERS}
    for path in CSRC.glob("*/*"):
        if path.parent != PATH and path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            others = {target.parent.name for target in includes(path)} - {path.parent.name, "reducer", CSRC.name}
            assert others <= FOLDERS[path.parent.name], path.relative_to(CSRC)
