"""Puts minddp's class in the place of torch's, for programs that construct torch's by its own name.

What always holds: between :func:`install` and :func:`uninstall` every module that held torch's
``DistributedDataParallel`` under some name holds minddp's under it, and so do modules imported later and
processes started by :mod:`multiprocessing`'s ``spawn`` and ``forkserver``. ``isinstance`` checks go on working, for
those that ask for torch's class too, because minddp's derives from it.

What it cannot reach: instances and subclasses of torch's class made before, references held outside modules
(in a list, in a closure), programs started by other means than ``multiprocessing``, and a forkserver for which the
program names afterwards what to preload.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ddp import DistributedDataParallel

__all__ = ["install", "uninstall"]

_torch_class = next(base for base in DistributedDataParallel.__mro__ if base.__module__.startswith("torch."))
_get_command_line = multiprocessing.spawn.get_command_line

_FORKSERVERS = "minddp.cli.installed"

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


def _spawn_installed(**kwargs: Any) -> list[str]:
    """The command line of a spawned process, with an ``install()`` before all else."""
    command = list(_get_command_line(**kwargs))
    if "-c" in command:
        root = str(Path(__file__).parents[2])
        code = command.index("-c") + 1
        command[code] = (
            f"import sys; sys.path.append({root!r}); from minddp.cli.install import install; install(); "
            + command[code]
        )
    return command


def _preloaded() -> list[str]:
    """What else the forkserver imports: the program may have named it."""
    named = multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    return [name for name in named if name != _FORKSERVERS]


def install() -> None:
    """Makes programs that construct ``torch.nn.parallel.DistributedDataParallel`` get minddp's class.

    Rebinds the class wherever an imported module holds it (``torch.nn.parallel``,
    ``torch.nn.parallel.distributed``, modules that did ``from torch.nn.parallel import
    DistributedDataParallel``). Calling it again rebinds what has been imported by other ways since.
    """
    for _, names, name in _holders(_torch_class):
        names[name] = DistributedDataParallel
        _rebound.append((names, name))
    multiprocessing.spawn.get_command_line = _spawn_installed
    multiprocessing.set_forkserver_preload([*_preloaded(), _FORKSERVERS])


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
    multiprocessing.spawn.get_command_line = _get_command_line
    multiprocessing.set_forkserver_preload(_preloaded())
