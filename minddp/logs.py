"""The log, ``logging.getLogger("minddp")``. What observes ends nothing.

A handler or a filter of the program's may raise, if it expects other records: that ends no backward and no watchdog.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

_log = logging.getLogger("minddp")


class _Log:
    """The three calls that minddp makes. They name the caller's line, as a Logger's own."""

    def info(self, text: str, *arguments: Any) -> None:
        with suppress(Exception):
            _log.info(text, *arguments, stacklevel=2)

    def warning(self, text: str, *arguments: Any) -> None:
        with suppress(Exception):
            _log.warning(text, *arguments, stacklevel=2)

    def error(self, text: str, *arguments: Any) -> None:
        with suppress(Exception):
            _log.error(text, *arguments, stacklevel=2)


log = _Log()
