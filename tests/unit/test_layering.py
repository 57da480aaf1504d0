"""Holds csrc to its shape: dependencies point down only, and the reading path stays short.

``csrc/README.md`` shows the order to a reader; this table holds it. A new unit is added to both.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# Lowest first: a unit may include those before it. `bindings` is not part of the reading path.
LAYERS = [
    "scaled_copy",
    "errors",
    "trace",
    "bucket",
    "grad_hooks",
    "param_usage",
    "comm_hook",
    "reducer",
    "bindings_comm_hook",
    "bindings",
]
BINDINGS = {"bindings_comm_hook", "bindings"}
PURE = {"scaled_copy", "errors", "trace"}
MAX_LINES = 1000

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def units() -> dict[str, list[Path]]:
    """The reading path's files and the bindings', by unit: csrc/*.h and csrc/*.cpp."""
    files: dict[str, list[Path]] = {}
    for path in sorted(CSRC.glob("*.h")) + sorted(CSRC.glob("*.cpp")):
        files.setdefault(path.stem, []).append(path)
    return files


def includes(path: Path) -> list[Path]:
    """The files of csrc that a file includes by a quoted name: relative to its folder, or to csrc."""
    names = INCLUDE.findall(path.read_text())
    found = [
        next((p for p in ((path.parent / name).resolve(), CSRC / name) if p.exists()), None) for name in names
    ]
    assert None not in found, f"{path.name} includes what is not there: {names}"
    return [p for p in found if p is not None]


def included_units(path: Path) -> set[str]:
    return {target.stem for target in includes(path) if target.parent == CSRC}


def test_every_unit_has_a_layer() -> None:
    assert sorted(units()) == sorted(LAYERS)


@pytest.mark.parametrize("unit", LAYERS)
def test_dependencies_point_down(unit: str) -> None:
    allowed = set(LAYERS[: LAYERS.index(unit) + 1])
    for path in units()[unit]:
        assert included_units(path) <= allowed, path.name


def test_nothing_but_the_bindings_includes_the_reducer() -> None:
    users = {unit for unit, paths in units().items() for path in paths if "reducer" in included_units(path)}
    assert users <= {"reducer"} | BINDINGS


def test_subfolders_stand_on_pure_units() -> None:
    """cpu/, cuda/, shm/ and transport/ know nothing of buckets or the reducer."""
    for path in CSRC.glob("*/*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            assert included_units(path) <= PURE, path.relative_to(CSRC)


def test_reading_path_is_short() -> None:
    lines = {
        path.name: len(path.read_text().splitlines())
        for unit, paths in units().items()
        if unit not in BINDINGS
        for path in paths
    }
    assert sum(lines.values()) < MAX_LINES, lines
