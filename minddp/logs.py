"""The log, ``logging.getLogger("minddp")``. What observes ends nothing.

A handler or a filter of the program's may raise, if it expects other records: that ends no backward and no watchdog.

A Python warning ends a program whose filter makes warnings errors. So minddp warns in that way only where torch's
class does, too, such as of a deprecated argument, or where the program has asked for a warning, as by
``check_finite="warn"``. Whatever minddp alone has noticed goes into the log.
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
