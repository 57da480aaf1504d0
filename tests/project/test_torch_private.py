"""What minddp uses of torch that torch does not promise to keep, in one list: ``torch_private.toml``.

A new release of torch that has moved any of it breaks this test, by name, and not an import somewhere. Where
all is there, ``python -m tests.project.test_torch_private`` writes that release down.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("torch_private.toml")
VERSION = ".".join(torch.__version__.split(".")[:2])
HEADERS = Path(torch.__file__).parent / "include"

INCLUDE = re.compile(r"#\s*include <(torch/csrc/[^>]+)>")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def chain(node: ast.AST) -> list[str]:
    """["torch", "_C", "name"] for ``torch._C.name``; [] for anything that does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*parts, node.id][::-1] if isinstance(node, ast.Name) else []


def defined_in(tree: ast.AST) -> set[str]:
    """Private names that are the project's own."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if chain(node.value) in (["self"], ["itself"], ["cls"]) else set()
    return names


def imported_in(tree: ast.AST) -> dict[str, str]:
    """What stands for something of torch's, by the name it has here."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name.split(".")[0] == "torch"):
                names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
    return names


def used() -> tuple[set[str], set[str]]:
    """Private paths into torch, and private attributes of objects that nothing here defines."""
    files = [path for kind in ("*.py", "*.pyi") for path in sorted((ROOT / "minddp").rglob(kind))]
    trees = [ast.parse(path.read_text()) for path in files]
    own = set().union(*map(defined_in, trees))
    paths, attributes = set(), set()
    for tree in trees:
        names = imported_in(tree)
        paths |= {path for path in names.values() if any(map(is_private, path.split(".")))}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            parts = chain(node)
            if parts and parts[0] in names:
                whole = [*names[parts[0]].split("."), *parts[1:]]
                if any(map(is_private, parts[1:])) and id(node) not in inner:
                    paths.add(".".join(whole))
            elif is_private(node.attr) and node.attr not in own:
                attributes.add(node.attr)
    return paths, attributes


def headers() -> set[str]:
    """Of torch/csrc, the part without a promise."""
    files = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    return {header for path in files for header in INCLUDE.findall(path.read_text())}


def listed() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text())
    return content


def resolves(path: str) -> bool:
    """Whether ``path`` leads from torch to something; parts are attributes, or modules not imported yet."""
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        done += f".{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(done)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_the_list_is_what_is_used() -> None:
    paths, attributes = used()
    assert set(listed()["names"]) == paths
    assert set(listed()["attributes"]) == attributes
    assert set(listed()["headers"]) == headers()


@pytest.mark.filterwarnings("ignore")  # of what torch imports
def test_it_is_all_in_the_installed_torch() -> None:
    gone = [path for path in listed()["names"] if not resolves(path)]
    gone += [header for header in listed()["headers"] if not (HEADERS / header).exists()]
    assert not gone, f"torch {torch.__version__} has moved {gone}: change what uses it, for the other releases too"


def test_the_installed_torch_was_seen() -> None:
    unseen = [name for table in ("names", "headers") for name, seen in listed()[table].items() if VERSION not in seen]
    assert not unseen, (
        f"torch {VERSION} is not noted for {unseen}. If the other tests pass with it: "
        "python -m tests.project.test_torch_private"
    )


def main() -> None:
    """Notes the installed torch for everything that it has, and lists what is new or no longer used."""
    before = listed() if LIST.exists() else {}
    paths, attributes = used()
    lines = ["# By `python -m tests.project.test_torch_private`: in which releases of torch each was seen.", ""]
    for table, names, is_there in (
        ("names", paths, resolves),
        ("headers", headers(), lambda header: (HEADERS / header).exists()),
    ):
        lines.append(f"[{table}]")
        for name in sorted(names):
            seen = set(before.get(table, {}).get(name, [])) | ({VERSION} if is_there(name) else set())
            text = ", ".join(f'"{version}"' for version in sorted(seen, key=lambda v: [int(x) for x in v.split(".")]))
            lines.append(f'"{name}" = [{text}]')
        lines.append("")
    lines += ["# Attributes of torch's objects, or of users' modules by torch's convention.", "[attributes]"]
    reasons = before.get("attributes", {})
    lines += [f'{name} = "{reasons.get(name, "?")}"' for name in sorted(attributes)]
    LIST.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
