"""``python -m minddp``: the command ``minddp``."""

import sys

from .cli.command import main

sys.exit(main())
