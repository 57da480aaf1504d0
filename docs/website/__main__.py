"""``python -m docs.website [--no-tutorials]``: see the package's text."""

import sys

from .build import main

sys.exit(main())
