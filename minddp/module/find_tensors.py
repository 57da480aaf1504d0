"""What forward returned: the tensors in it, as far as they can be seen."""

from __future__ import annotations

import torch
from torch.distributed import rpc

from .. import _C


class _NoReference:
    """Where torch was built without RPC."""


REFERENCES: type = rpc.RRef if rpc.is_available() else _NoReference


def find_tensors(output: object) -> list[torch.Tensor]:
    """The tensors that require a gradient: in lists, tuples, sets, dicts, dataclasses, RRefs of this process.

    Where none does, one of the others, if there is any. What is in it several times, or contains itself, is entered
    once. No code of the program's runs: a container of a class of its own is read where lists, tuples and dicts keep
    their items, other mappings are not entered.
    """
    return _C.find_tensors(output, REFERENCES)
