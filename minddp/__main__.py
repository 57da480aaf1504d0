"""``python -m minddp``: the command ``minddp``."""

import sys

from .launching.command import main

sys.exit(main())
