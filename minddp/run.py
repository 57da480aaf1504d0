"""``torchrun -m minddp.run script.py``: the command ``minddp run``, by a name that torchrun can start."""

import sys

from .cli.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
