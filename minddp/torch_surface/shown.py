"""What a wrapper shows under a name that is a plain attribute of torch's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class shown(Generic[Value]):
    """A property that an instance's own attribute takes the place of: a subclass may assign to it."""

    def __init__(self, function: Callable[[Any], Value]):
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Value:
        return self if instance is None else self._function(instance)  # type: ignore[return-value]
