"""Puts minddp's class in the place of torch's, for programs that construct torch's by its own name.

What always holds: between :func:`install` and :func:`uninstall` every module that held torch's
``DistributedDataParallel`` under some name holds minddp's under it, and so do modules imported later, and modules of
Pythons that this process starts. ``isinstance`` checks go on working, for those that ask for torch's class too,
because minddp's derives from it.

Other Pythons are reached by ``PYTHONPATH``, which begins with the folder ``startup``. What is not reached:
docs/launching.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ddp import DistributedDataParallel

__all__ = ["install", "uninstall"]

_torch_class = next(base for base in DistributedDataParallel.__mro__ if base.__module__.startswith("torch."))
_STARTUP = str(Path(__file__).resolve().with_name("startup"))

# The namespaces and names that install() rebound; empty when nothing is installed.
_rebound: list[tuple[dict[str, Any], str]] = []


def _holders(value: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each place in an imported module, minddp's own aside, that holds ``value``: module, names, name."""
    package = __name__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package:
            continue
        names = getattr(module, "__dict__", {})
        for name, held in list(names.items()):
            if held is value:
                yield module_name, names, name


def _search_path() -> list[str]:
    """The entries of ``PYTHONPATH`` that are not minddp's; an empty one is the folder of the process."""
    value = os.environ.get("PYTHONPATH")
    return [entry for entry in value.split(os.pathsep) if entry != _STARTUP] if value else []


def install() -> None:
    """Makes programs that construct ``torch.nn.parallel.DistributedDataParallel`` get minddp's class.

    Rebinds the class wherever an imported module holds it (``torch.nn.parallel``,
    ``torch.nn.parallel.distributed``, modules that did ``from torch.nn.parallel import
    DistributedDataParallel``). Calling it again rebinds what has been imported by other ways since. Pythons
    that this process starts from now on do the same when they import torch.
    """
    for _, names, name in _holders(_torch_class):
        names[name] = DistributedDataParallel
        _rebound.append((names, name))
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *_search_path()])


def uninstall() -> None:
    """Undoes :func:`install`; does nothing when nothing is installed.

    Modules of the program that were imported in between and took the class by name keep minddp's: there is
    no telling whether they asked torch or minddp for it. Modules of torch get torch's back.
    """
    if not _rebound:
        return
    for names, name in _rebound:
        if names.get(name) is DistributedDataParallel:
            names[name] = _torch_class
    _rebound.clear()
    for module_name, names, name in _holders(DistributedDataParallel):
        if module_name.partition(".")[0] == "torch":
            names[name] = _torch_class
    if others := _search_path():
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
