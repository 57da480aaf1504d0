"""Lets a clone be used as if it were installed: `python .ci/clone.py` in its folder, with its environment's Python.

`.venv/bin/python script.py` finds the package built in place, without make; `.venv/bin/minddp` is the command.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

# The guard is for ranks that are spawned: each of them runs the main script again.
COMMAND = """\
#!{python}
import sys

from minddp.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
"""


def write_command(path: Path) -> None:
    path.write_text(COMMAND.format(python=sys.executable))
    path.chmod(0o755)


if __name__ == "__main__":
    Path(sysconfig.get_path("purelib"), "clone.pth").write_text(os.getcwd())
    write_command(Path(sysconfig.get_path("scripts"), "minddp"))
