"""Runs a user's script as it is, and ends the process without shutting Python down.

A rank with torch's class may abort there (``minddp/guards/lifetime.py`` says why): with three ranks, about every
other run of ``scripts/checkpoint_script.py`` did. minddp's ranks must end by themselves: they run without this.
"""

import os
import runpy
import sys


def main() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
