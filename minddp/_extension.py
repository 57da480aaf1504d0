"""Loads the compiled half, ``minddp._C``, and says what it was built with.

What always holds: the extension is loaded only into the torch that it was compiled against. C++ symbols
differ from release to release, so loading it into another one ends in an undefined symbol, or worse,
in a layout that no longer matches; so the build's record (``_build.json`` beside the extension) is
compared first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["build_record", "config", "load"]

_REBUILD = "pip install --no-build-isolation . (from the minddp sources)"


def build_record() -> dict[str, str | None]:
    """What the extension was built with: version, torch, python, compiler, flags, cuda, cuda_archs.

    Raises:
        ImportError: the extension is not built.
    """
    spec = importlib.util.find_spec("minddp._C")
    if spec is None or spec.origin is None:
        raise ImportError(f"minddp's extension is not built for this Python.{_hidden() or f' Build it: {_REBUILD}'}")
    # The record lies beside the real file: a checkout may link to another's extension.
    record = Path(spec.origin).resolve().with_name("_build.json")
    try:
        content: dict[str, str | None] = json.loads(record.read_text())
    except FileNotFoundError:
        raise ImportError(f"minddp's extension has no record of its build. Rebuild it: {_REBUILD}") from None
    return content


def _hidden() -> str:
    """Says where an installed minddp is that these sources hide, as a clone's do in the clone's folder."""
    here = Path(__file__).resolve().parent
    for installed in (Path(entry, "minddp").resolve() for entry in sys.path):
        if installed != here and any((installed / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
            return (
                f" These are the sources in {here}, and they hide the minddp that is installed in {installed}: run "
                "`python -P`, or go to another folder."
            )
    return ""


def load() -> ModuleType:
    """Imports ``minddp._C``.

    Raises:
        ImportError: it is not built, was built against another torch, or does not load.
    """
    built = build_record()["torch"]
    if built != torch.__version__:
        raise ImportError(
            f"minddp in {Path(__file__).parent} was built against torch {built}, but torch {torch.__version__} is "
            f"installed.{_hidden()} Install torch {built}, or rebuild that minddp for this torch: {_REBUILD}"
        )
    try:
        return importlib.import_module("minddp._C")
    except ImportError as error:
        raise ImportError(f"minddp's extension does not load ({error}). Rebuild it: {_REBUILD}") from error


def config() -> str:
    """What minddp was built with, as text to read or to paste into a bug report."""
    record = build_record()
    cuda = f"{record['cuda']} for {record['cuda_archs']}" if record["cuda"] else "no"
    return "\n".join(
        [
            f"minddp {record['version']}",
            f"  package: {Path(__file__).parent}",
            f"  torch: {record['torch']}",
            f"  python: {record['python']}",
            f"  compiler: {record['compiler']} ({record['flags']})",
            f"  cuda: {cuda}",
        ]
    )
