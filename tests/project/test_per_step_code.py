"""Code that runs in every step makes no tensor from host values on a device, and reads none back.

Both wait for the device, or copy from pageable memory, and neither may be captured in a CUDA graph. What is meant
stands in ``ALLOWED``, by file and function, with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minddp"

# File -> the functions that run in every step; None for all of them.
PER_STEP: dict[str, set[str] | None] = {
    "functional/sync_batchnorm.py": None,
    "functional/collectives.py": None,
    "functional/calls.py": None,
    "functional/agreement.py": None,
    "functional/control.py": None,
    "functional/linear.py": None,
    "functional/transport.py": None,
    "start.py": {"broadcast_coalesced", "_receive", "_once", "_messages"},
}
ALLOWED = {
    (
        "functional/sync_batchnorm.py",
        "_require_two_values",
        "item",
    ): "read only where a rank has at most one value per channel",
    ("functional/control.py", "compare", "tolist"): "of a tensor on the CPU, as it travels",
    ("functional/control.py", "exchange", "tolist"): "of a tensor on the CPU, as it travels",
    ("functional/control.py", "compare", "tensor"): "on the CPU, whatever the default device is",
    ("functional/control.py", "exchange", "tensor"): "as above",
    ("functional/agreement.py", "require_replicated", "tolist"): "a check that can be turned off; it says so",
}
READS = {"item", "tolist", "cpu", "numpy"}
MAKES = {"new_tensor"}


def found(source: str) -> Iterator[tuple[str, str, int]]:
    """(function, what, line) of each call that is looked for."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                name = child.func.attr
                on_device = any(keyword.arg == "device" for keyword in child.keywords)
                if name in READS | MAKES or (name in ("tensor", "as_tensor") and on_device):
                    yield inside, name, child.lineno
            yield from walk(child, inside)

    yield from walk(ast.parse(source), "")


@pytest.mark.parametrize("file", PER_STEP)
def test_no_copies_between_host_and_device_in_a_step(file):
    functions = PER_STEP[file]
    wrong = [
        f"minddp/{file}:{line}: {what} in {function}"
        for function, what, line in found((PACKAGE / file).read_text())
        if (functions is None or function in functions) and (file, function, what) not in ALLOWED
    ]
    assert not wrong, "use new_full, keep values on the device, or give a reason in ALLOWED:\n" + "\n".join(wrong)
