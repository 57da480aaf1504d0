"""The law: the core is what lies directly in ``minddp/``, ``csrc/reducer`` and ``csrc/copy``, and knows no companion.

Everything else is a companion, in a folder of one name. It imports core files, the extension, and at most the
companions that the first line of its docstring names. ``python -m tests.project.test_law`` prints what imports
what, and the picture of the house.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minddp"
NATIVE = {"_C", "_shm"}  # whoever needs them
DOORS = {"", "__main__", "run"}  # files of the core through which companions come in, when they are asked for


def name_of(path: Path) -> str:
    """ "planner.plan" for minddp/planner/plan.py, "planner" for its ``__init__``, "" for the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
COMPANIONS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All of it but what is imported for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _walk(child)


def imports(name: str, path: Path) -> set[str]:
    """The files of the package that a file imports anywhere, in functions too."""
    here = name.split(".") if name else []
    folder = here if path.stem == "__init__" else here[:-1]
    found = set()
    for node in _walk(ast.parse(path.read_text())):
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
                found.add(longer if longer in FILES or alias.name in NATIVE else ".".join(module))
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name, path) for name, path in FILES.items()}


def companion(name: str) -> str | None:
    """The companion that a file belongs to; None: it is the core's."""
    first = name.split(".")[0]
    return first if first in COMPANIONS else None


def named_companions(name: str) -> set[str]:
    """Those that the first line of a companion's docstring names, after "Uses"."""
    text = ast.get_docstring(ast.parse(FILES[name].read_text())) or ""
    _, _, uses = text.partition("\n")[0].partition("Uses ")
    return set(re.findall(r"[a-z_]+", uses))


def core_to_companion() -> set[tuple[str, str]]:
    """(a file of the core, a companion that it imports)."""
    return {
        (name, other)
        for name, targets in graph().items()
        if companion(name) is None and name not in DOORS
        for other in map(companion, targets)
        if other is not None
    }


def test_no_import_goes_from_the_core_to_a_companion() -> None:
    assert not core_to_companion()


def test_a_companion_imports_the_core_and_the_companions_that_it_names() -> None:
    wrong = {}
    for name, targets in graph().items():
        mine = companion(name)
        others = {companion(target) for target in targets} - {None, mine}
        if mine is not None and not others <= named_companions(mine):
            wrong[f"minddp/{name}"] = others - named_companions(mine)
    assert not wrong, f"companions that the first line does not name: {wrong}"


def test_no_circles() -> None:
    """Between files. A folder's own text may list what it offers; its files do not import that text."""
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def floors(imported: dict[str, set[str]]) -> list[list[str]]:
    """Each name above all that it imports, the highest floor first."""

    @functools.cache
    def floor(name: str) -> int:
        return max((1 + floor(below) for below in imported[name]), default=0)

    return [sorted(n for n in imported if floor(n) == level) for level in range(max(map(floor, imported)), -1, -1)]


def picture() -> str:
    """The house, one floor a line: the companions, and below them the core's files. Who imports stands above."""
    core = {name for name in FILES if companion(name) is None and name not in DOORS}
    above: dict[str, set[str]] = {name: set() for name in COMPANIONS}
    for name, targets in graph().items():
        if (mine := companion(name)) is not None:
            above[mine] |= {other for other in map(companion, targets) if other not in (None, mine)}
    below = {name: graph()[name] & core for name in core}
    rows = [*floors(above), ["-" * 72], *floors(below), ["_C: csrc/reducer, csrc/copy"]]
    return "\n".join("   ".join(row) for row in rows)


def test_the_picture_of_the_house_is_drawn_from_the_imports() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    drawn = picture()
    assert drawn in text, f"CONTRIBUTING.md shows another house than this:\n{drawn}"


def test_the_environment_is_read_in_one_place() -> None:
    """But for the commands, which set it for the ranks that they start, and a rank's own number."""
    readers = {name.split(".")[0] for name, path in FILES.items() if "os.environ" in path.read_text()}
    assert readers <= {"environment", "cli"}


if __name__ == "__main__":
    for name in TopologicalSorter(graph()).static_order():
        if name in graph():
            print(f"{name or '(package)':32} {', '.join(sorted(graph()[name] - NATIVE))}")
    print(picture())
    print("from the core to companions:", sorted(core_to_companion()) or "none")
