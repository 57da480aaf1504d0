"""What the library logs, for tests."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """A list that fills with the texts."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("minddp")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
