"""Which minddp is imported: sources that are not built give way to an installed package.

In a clone's root ``import minddp`` finds the clone's folder before what ``pip install .`` has put into the
environment, since Python looks into the working directory first. The clone's has no extension there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["package_path"]


def package_path(path: Iterable[str]) -> list[str]:
    """Where the package's files are imported from: ``path``, or an installed minddp where that is not built.

    Warns where the installed files are others than the sources.
    """
    path = list(path)
    sources = Path(path[0])
    if _built(sources):
        return path
    for entry in sys.path:
        installed = Path(entry, "minddp")
        if installed.resolve() != sources.resolve() and _built(installed):
            _compare(sources, installed)
            return [str(installed)]
    return path


def _built(package: Path) -> bool:
    return any((package / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _compare(sources: Path, installed: Path) -> None:
    for file in sorted(sources.rglob("*.py")):
        other = installed / file.relative_to(sources)
        if not other.exists() or other.read_bytes() != file.read_bytes():
            warnings.warn(
                f"minddp is imported from {installed}, as it was installed: the sources in {sources} are not built, "
                f"and differ from it ({file.relative_to(sources)}). To use them: pip install --no-build-isolation .",
                RuntimeWarning,
                stacklevel=3,
            )
            return
