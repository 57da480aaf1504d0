"""Holds csrc to its shape: the core includes nothing of a companion's, and its units depend in one direction.

``csrc/README.md`` shows the order to a reader; these tables hold it. A new unit is added to both.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# The core's units, lowest first: a unit may include those before it.
UNITS = [
    "seen_gradient",
    "wait",
    "errors",
    "bucket",
    "lone_bucket",
    "graph_task",
    "forwards",
    "grad_hooks",
    "iteration",
    "used_map",
    "events",
    "comm_hook",
    "program_collectives",
    "stamps",
    "reducer",
    "between_iterations",
]
CORE = {"reducer", "copy"}
# What each folder may include beside itself. A companion may also include the core.
FOLDERS = {
    "copy": set(),
    "reducer": {"copy"},
    "guards": CORE,
    "reductions": CORE,
    "torch_surface": CORE,
    "wire": CORE,
    "shm": CORE,
}

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(path: Path) -> str:
    """ "wire" for csrc/wire/cuda/x.h, "" for csrc/bindings.h."""
    parts = path.relative_to(CSRC).parts
    return parts[0] if len(parts) > 1 else ""


def sources() -> list[Path]:
    return [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cuh", ".cpp", ".cu")]


def includes(path: Path) -> list[Path]:
    """The files of csrc that a file includes by a quoted name: relative to its folder, or to csrc."""
    names = INCLUDE.findall(path.read_text())
    found = [next((p for p in ((path.parent / name).resolve(), CSRC / name) if p.exists()), None) for name in names]
    assert None not in found, f"{path.name} includes what is not there: {names}"
    return [p for p in found if p is not None]


def test_every_unit_has_a_place() -> None:
    assert {path.stem for path in (CSRC / "reducer").iterdir()} == set(UNITS)
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders == set(FOLDERS), "FOLDERS, above, says what each folder of csrc may include"
    page = (CSRC / "README.md").read_text()
    assert not [name for name in folders if f"`{name}/" not in page], "csrc/README.md describes each folder"


@pytest.mark.parametrize("unit", UNITS)
def test_units_of_the_core_depend_in_one_direction(unit: str) -> None:
    allowed = set(UNITS[: UNITS.index(unit) + 1])
    for path in (CSRC / "reducer").glob(f"{unit}.*"):
        found = {target.stem for target in includes(path) if folder_of(target) == "reducer"}
        assert found <= allowed, path.name


def test_folders_include_what_they_may() -> None:
    for path in sources():
        folder = folder_of(path)
        others = {folder_of(target) for target in includes(path)} - {folder}
        if path.stem.startswith("bindings"):
            others.discard("")
        allowed = FOLDERS.get(folder, CORE)
        assert others <= allowed, path.relative_to(CSRC)
