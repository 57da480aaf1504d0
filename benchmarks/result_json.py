"""The text of a result file: JSON whose differences can be read. Needs nothing but Python, as gpu_check.py does."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["as_json"]

_LINE = 118  # characters


def as_json(value: Any, indent: int = 0) -> str:
    """An array stands on one line; one of objects has a line for each. An object that fits into a line has one."""
    line = json.dumps(value)
    if not isinstance(value, (dict, list, tuple)) or indent + len(line) <= _LINE:
        return line
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {as_json(item, indent + 1)}" for key, item in value.items()]
    elif any(isinstance(item, dict) for item in value):
        items = [json.dumps(item) for item in value]
    else:
        return line
    begin, end = "{}" if isinstance(value, dict) else "[]"
    separator = ",\n" + " " * (indent + 1)
    return f"{begin}\n{' ' * (indent + 1)}{separator.join(items)}\n{' ' * indent}{end}"
