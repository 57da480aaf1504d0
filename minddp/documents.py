"""Files of JSON, such as plans and traces: read only if they have their shape, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from math import isfinite
from typing import Any

from .logs import log

__all__ = ["misfit", "parse", "path_text", "refuse_device", "write_or_log", "write_whole"]

_MOST = 2**63 - 1  # what the numbers are computed with has 64 bits


def parse(text: str) -> Any:
    """The JSON in ``text``; ValueError if it is none, or so deep that nothing can read it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text is no JSON ({error})") from error


def misfit(value: Any, shape: Any, place: str = "it") -> str:
    """Which part of ``value`` does not have its shape, and why; empty if all parts have it.

    A shape is a type; a list of one shape, which all items have; a tuple of shapes, one of which it has; or a dict of
    shapes, for keys that must be there, or may be there if the name ends in ``?``. Numbers are finite, and an integer
    has 64 bits.
    """
    if isinstance(shape, tuple):
        reasons = [misfit(value, one, place) for one in shape]
        return "" if "" in reasons else reasons[0]
    if isinstance(shape, list):
        inside = [(item, shape[0], f"{place}[{i}]") for i, item in enumerate(value)] if type(value) is list else None
    elif isinstance(shape, dict):
        keys = [(key.removesuffix("?"), one, key.endswith("?")) for key, one in shape.items()]
        inside = None
        if type(value) is dict:
            if missing := [key for key, _, optional in keys if key not in value and not optional]:
                return f"{place} has no {missing[0]!r}"
            inside = [(value[key], one, f"{place}[{key!r}]") for key, one, _ in keys if key in value]
    else:
        small = (type(value) is not int or abs(value) <= _MOST) and (type(value) is not float or isfinite(value))
        inside = [] if small and type(value) is (type(None) if shape is None else shape) else None
    if inside is None:
        return f"{place} is {repr(value)[:60]}"
    return next(filter(None, (misfit(*part) for part in inside)), "")


def path_text(path: Any, argument: str) -> str:
    """``path``, which a function was given as ``argument``, as text; TypeError if it is no path."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise TypeError(f"{argument} must be a path, as text or os.PathLike, got {path!r}")
    return text


def refuse_device(path: str | os.PathLike[str], where: str = "") -> None:
    """Raises OSError if there is a device, a pipe or a socket at ``path``, or behind a link: a new file in its place
    would take it from the whole machine, as ``/dev/null``."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(
                errno.EINVAL, f"{where}is a device, a pipe or a socket: no file takes its place", os.fspath(path)
            )


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """A reader sees the old file or the new one, never half of it. Nobody's link at ``path`` is followed.

    Raises:
        OSError: it could not be written, or it is no file (:func:`refuse_device`).
    """
    refuse_device(path)
    partial = f"{os.fspath(path)}.{secrets.token_hex(4)}.part"
    try:
        with open(partial, "x", encoding="utf-8") as file:  # "x" follows no link that somebody else has put there
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def write_or_log(path: str | os.PathLike[str], text: str, what: str) -> bool:
    """:func:`write_whole` of ``what``, while a program trains: a disk that is full ends no training. Whether it was
    written; the log has the path and the reason if not."""
    try:
        write_whole(path, text)
    except OSError as error:
        log.warning("%s %s could not be written: %s", what, os.fspath(path), error.strerror or error)
        return False
    return True
