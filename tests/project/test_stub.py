"""minddp/_C.pyi names what the extension has, no more and no less."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import minddp
from minddp import _extension

STUB = Path(minddp.__file__).with_name("_C.pyi")
# In the extension only when it is built with CUDA.
CUDA_ONLY = {"cuda_scaled_copy"}
# What pybind11 adds to every class, and to enums.
PYBIND11 = {"_pybind11_conduit_v1_", "name", "value"}


def stub_names() -> dict[str, set[str]]:
    """The stub's top-level names; a class with its members."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
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


def extension_names(module: Any) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for name, value in vars(module).items():
        if not name.startswith("__"):
            own = vars(value) if inspect.isclass(value) else {}
            names[name] = {member for member in own if not member.startswith("__")} - PYBIND11
    return names


def test_the_stub_names_what_the_extension_has() -> None:
    module = _extension.load()
    stub = stub_names()
    for name in CUDA_ONLY - set(vars(module)):
        del stub[name]
    for members in stub.values():
        members.discard("__init__")
    assert extension_names(module) == stub
