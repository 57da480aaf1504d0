"""What forward returned: the tensors in it, as far as they can be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed import rpc

_REFERENCES: Any = rpc.RRef if rpc.is_available() else ()


def find_tensors(value: Any, _above: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings, dataclasses and RRefs of this process.

    What contains itself is entered once.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, int, float)) or value is None or id(value) in _above:
        return
    above = (*_above, id(value))
    if isinstance(value, _REFERENCES):
        if value.is_owner():
            yield from find_tensors(value.local_value(), above)
        return
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item, above)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, above)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name, None), above)  # a field may be unset
