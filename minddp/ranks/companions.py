"""What minddp has made beside a process group for the same ranks, and what ends with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

# No value may refer to its key: the group would live for ever.
_companions: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def of(group: Any) -> dict[str, Any]:
    """By what they are for."""
    return _companions.setdefault(group, {})
