"""Holds ``minddp/`` to its rooms: imports point down only, and no two files know each other.

``python -m tests.project.test_rooms`` prints the graph.
"""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minddp"

# Lowest first. A room, or a file that is one, may import what stands before it, as far as its text allows.
ROOMS = {
    "_functions": set(),
    "_extension": set(),
    "environment": set(),
    "planner": set(),
    "wire": set(),
    "config": {"environment", "planner", "wire"},
    "ranks": {"environment"},
    "guards": {"_functions", "environment", "ranks"},
    "reduction": {"_functions", "config", "ranks", "guards", "wire"},
    "timeline": {"_functions", "environment", "guards"},
    "straggler": {"_functions", "guards", "planner", "ranks", "timeline"},
    "functional": {"environment", "ranks"},
    "sync_batchnorm": {"ranks", "functional"},
    "shm": {"_extension"},
    "module": {
        "_functions", "config", "environment", "ranks", "guards", "reduction", "planner", "timeline", "straggler",
        "wire",
    },
    "owned": {"guards", "module", "ranks"},
    "testing": set(),
    "cli": {"_extension", "module", "planner", "timeline", "straggler", "shm", "testing"},
    "__main__": {"cli"},
    "run": {"cli"},
}
NATIVE = "_C"  # whoever needs it


def name_of(path: Path) -> str:
    """ "module.engine" for minddp/module/engine.py, "module" for its ``__init__``, "" for the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, path: Path) -> set[str]:
    """The files of the package that a file imports anywhere, in functions and for types too."""
    here = name.split(".") if name else []
    folder = here if path.stem == "__init__" else here[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            origins = [alias.name.split(".") for alias in node.names if alias.name.split(".")[0] == "minddp"]
            found |= {".".join(origin[1:]) for origin in origins}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = folder[: len(folder) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "minddp":
                base = []
            else:
                continue
            module = (node.module or "").split(".") if node.module else []
            module = base + [part for part in module if node.level or part != "minddp"]
            for alias in node.names:
                longer = ".".join([*module, alias.name])
                found.add(longer if longer in FILES or alias.name == NATIVE else ".".join(module))
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name, path) for name, path in FILES.items()}


def room(name: str) -> str:
    return name.split(".")[0]


def test_every_file_is_in_a_room() -> None:
    assert {room(name) for name in FILES if name} == set(ROOMS)


def test_rooms_are_listed_lowest_first() -> None:
    order = list(ROOMS)
    for name, allowed in ROOMS.items():
        assert allowed <= set(order[: order.index(name)]), name


def test_imports_point_down() -> None:
    wrong = {}
    for name in filter(None, FILES):
        others = {room(target) for target in graph()[name] if target != NATIVE} - {room(name)}
        if not others <= ROOMS[room(name)]:
            wrong[f"minddp/{name}"] = others - ROOMS[room(name)]
    assert not wrong, f"imports from rooms above, or of no concern: {wrong}"


def test_no_circles() -> None:
    """Between files. A room's own text may list what it offers; its files do not import that text."""
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_every_room_says_what_it_is() -> None:
    for name in ROOMS:
        path = PACKAGE / name / "__init__.py"
        if path.exists() and name != "functional":  # whose text says what its gradients are
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert "Here:" in text and "Not here:" in text and "import" in text, name


def test_the_environment_is_read_in_one_place() -> None:
    """But for starters of ranks, which set it for others, and a rank's own number."""
    readers = {name for name, path in FILES.items() if "os.environ" in path.read_text()}
    assert readers <= {"environment", "testing", "cli.tune", "cli.run"}


if __name__ == "__main__":
    for name in TopologicalSorter(graph()).static_order():
        if name in graph():
            print(f"{name or '(package)':32} {', '.join(sorted(graph()[name] - {NATIVE}))}")
