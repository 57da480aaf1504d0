"""The stubs name what the extensions have, no more and no less."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import minddp
from minddp import _extension

FOLDER = Path(minddp.__file__).parent
# The stub of each module; the companions' lie beside the core's.
STUBS = {"_C": FOLDER / "_C" / "__init__.pyi", "_shm": FOLDER / "_shm.pyi"} | {
    f"_C.{path.stem}": path for path in (FOLDER / "_C").glob("[a-z]*.pyi")
}
# What pybind11 adds to every class, and to enums.
PYBIND11 = {"_pybind11_conduit_v1_", "name", "value"}


def stub_names(stub: Path) -> dict[str, set[str]]:
    """The stub's top-level names; a class with its members."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            names[node.name] = {name for member in node.body for name in member_names(member)}
    return names


def member_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def added(name: str, value: Any) -> bool:
    """By Python, such as what torch_surface gives the reducer: a function, or another name of what is there."""
    return inspect.isfunction(value) or getattr(value, "__name__", name) != name


def extension_names(module: Any) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for name, value in vars(module).items():
        if not name.startswith("__") and not inspect.ismodule(value):
            own = vars(value) if inspect.isclass(value) else {}
            names[name] = {m for m in own if not (m.startswith("__") or added(m, own[m]))} - PYBIND11
    return names


def test_each_module_has_a_stub() -> None:
    modules = {f"_C.{name}" for name, value in vars(_extension.load()).items() if inspect.ismodule(value)}
    lacking = sorted(modules - set(STUBS))
    assert not lacking, f"write {', '.join(f'minddp/{name}.pyi'.replace('_C.', '_C/') for name in lacking)}"


@pytest.mark.parametrize("name", STUBS)
def test_the_stub_names_what_the_extension_has(name: str) -> None:
    _extension.load()
    extension, _, companion = name.partition(".")
    module = importlib.import_module(f"minddp.{extension}")
    if companion:
        module = getattr(module, companion)
    stub = stub_names(STUBS[name])
    for members in stub.values():
        members -= {"__init__", "__getattr__"}
    names = extension_names(module)
    assert names == stub
