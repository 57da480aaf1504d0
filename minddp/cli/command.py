"""The command ``minddp``: ``python -m minddp`` where it is not on PATH.

    minddp run script.py [arguments]      an unmodified program, with minddp in the place of torch's class
    minddp tune --model mine:make ...     finds a model's buckets and writes them as a plan
    minddp timeline trace.json            exposed communication per bucket; one step of all ranks as a picture
    minddp report trace.json              which rank is slow, and in what
    minddp doctor                         what is installed and built, and whether a step on two ranks works here

``minddp COMMAND --help`` says more, and ``minddp --version`` which release this is. Benchmarks are scripts of the
source tree: ``python benchmarks/bucket_size.py``.
Under torchrun: ``torchrun --nproc-per-node 2 -m minddp run script.py``.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

# Where each command's main(arguments) is; imported when it is asked for.
COMMANDS = {
    "run": ".cli.run",
    "tune": ".cli.tune",
    "timeline": ".timeline.reader",
    "report": ".straggler.command",
    "doctor": ".cli.doctor",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["run"], ["tune"]):  # what a program raises is its own
        return _run(words)
    try:
        status = _run(words)
        if sys.stdout is not None:  # a shell's `>&-`
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # Nobody reads the output any more, as behind `| head`, or it has no room: what is left of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print(f"minddp: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print("minddp", importlib.import_module(__name__.partition(".")[0]).__version__)
        return 0
    asked = words[:1] in (["-h"], ["--help"])
    if asked or not words or words[0] not in COMMANDS:
        if words and not asked:
            print(f"minddp: there is no command {words[0]!r}", file=sys.stderr)
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    part = importlib.import_module(COMMANDS[words[0]], package=__name__.partition(".")[0])
    return int(part.main(words[1:]) or 0)
