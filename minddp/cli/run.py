"""Runs an unmodified program with minddp in the place of torch's DistributedDataParallel.

    minddp run script.py [arguments]
    minddp run -m package.module [arguments]
    torchrun --nproc-per-node 2 -m minddp.run script.py [arguments]

Ranks come from torchrun's variables; docs/launching.md sets them from SLURM's and Open MPI's. The program sees
``sys.argv``, ``sys.path`` and ``__main__`` as if Python ran it by itself.
"""

from __future__ import annotations

import importlib.machinery
import os
import pkgutil
import runpy
import sys
import types

from .install import install

_USAGE = "usage: minddp run {script.py | -m module} [arguments]"


def _new_main(**names: object) -> dict[str, object]:
    """It stays ``__main__`` when the program's last line is over: handlers at exit may pickle its classes."""
    before = vars(sys.modules["__main__"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    main = vars(sys.modules["__main__"])
    main.update({name: before[name] for name in ("__annotations__", "__builtins__") if name in before}, **names)
    return main


def _look_first_in(folder: str) -> None:
    """``folder`` takes the place of that from which Python has started minddp."""
    if not sys.flags.safe_path:  # which leaves out that place
        sys.path[0] = folder


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments]  # the file's path is put in the first place
    _look_first_in(os.getcwd())
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what python -m does


def _run_script(given: str, arguments: list[str]) -> None:
    if not os.path.exists(given):
        sys.exit(f"minddp run: there is no file {given!r} (working directory {os.getcwd()!r})")
    sys.argv = [given, *arguments]
    path = os.path.join(os.getcwd(), given)
    if pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__.py
        sys.path[: 0 if sys.flags.safe_path else 1] = [path]
        _new_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _look_first_in(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _new_main(__file__=path, __loader__=loader, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), main)


def main(arguments: list[str]) -> None:
    """Installs minddp and runs the program that ``arguments`` name; exits with 2 where they name none."""
    module = arguments[:1] == ["-m"]
    program = arguments[1:] if module else arguments
    if program[:1] in (["-h"], ["--help"]):
        print(__doc__, file=sys.stderr)
        sys.exit(0)
    if not program or (not module and program[0].startswith("-")):
        if program:
            print(f"minddp run: there is no option {program[0]!r} (SLURM, MPI: docs/launching.md)", file=sys.stderr)
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    install()
    (_run_module if module else _run_script)(program[0], program[1:])
