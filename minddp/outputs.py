"""Forward's output: the tensors in it, as far as they can be seen, and their one node in autograd's graph.

What always holds
    The program's code does not run. Types are asked by ``type()``, since ``isinstance`` may run a property, told
    apart by ``id()``, and read by ``type``'s own attributes, whatever their metaclass makes of it. A container is
    read by the methods of ``list``, ``tuple`` or ``dict``, whatever its class makes of access. A dataclass is read
    where it keeps its fields: in its ``__dict__``, or in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch.distributed import rpc
from torch.utils._pytree import tree_flatten, tree_unflatten


class _NoReference:
    """Where torch was built without RPC."""


REFERENCES: type = rpc.RRef if rpc.is_available() else _NoReference

Reader = Callable[[Any], Iterable[Any]]
_UNSET = object()
_mro, _members = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def find_tensors(output: object) -> list[torch.Tensor]:
    """The tensors that require a gradient: in lists, tuples, sets, dicts, dataclasses, RRefs of this process.

    If none requires a gradient, one of the others is returned, if there is any. A container that is there several
    times, or contains itself, is entered once. Mappings that are no dicts are not entered.
    """
    readers, entered = dict(_READERS), set()
    found: list[torch.Tensor] = []
    other: torch.Tensor | None = None
    values: list[Any] = [output]
    with torch._C.DisableTorchFunction():  # a tensor's class may answer for `requires_grad`
        for value in values:  # which grows meanwhile, and keeps alive what was made to be read
            kind = type(value)
            if id(kind) not in readers:
                readers[id(kind)] = _reader(kind)
            read = readers[id(kind)]
            if read is None:
                continue
            if read is _tensor:
                if _requires_grad(value):
                    found.append(value)
                elif other is None:
                    other = value
            elif id(value) not in entered:
                entered.add(id(value))
                values.extend(read(value))
    return found if found or other is None else [other]


def _tensor(value: torch.Tensor) -> Iterable[Any]:
    """This stands for tensors, which are not entered."""
    return ()


def _reference(value: Any) -> Iterable[Any]:
    return (value.local_value(),) if value.is_owner() else ()


_READERS_OF_SUBCLASSES: dict[type, Reader] = {
    torch.Tensor: _tensor, list: list.__iter__, tuple: tuple.__iter__, dict: dict.values, REFERENCES: _reference,
}  # fmt: skip
_READERS: dict[int, Reader | None] = {  # by the type's id
    id(torch.Tensor): _tensor, id(list): list.__iter__, id(tuple): tuple.__iter__, id(dict): dict.values,
    id(set): set.__iter__, id(frozenset): frozenset.__iter__,
    **dict.fromkeys(map(id, (int, float, bool, str, type(None)))),
}  # fmt: skip


def _reader(kind: type) -> Reader | None:
    """The function that reads objects of this type; None if nothing is in them."""
    for base, read in _READERS_OF_SUBCLASSES.items():
        if issubclass(kind, base):
            return read
    members: dict[str, Any] = {}
    for base in reversed(_mro(kind)):
        members |= _members(base)
    fields = members.get("__dataclass_fields__")
    if not isinstance(fields, dict):
        return None

    def read_fields(value: Any) -> Iterator[Any]:
        place = members.get("__dict__")
        attributes = place.__get__(value) if isinstance(place, GetSetDescriptorType) else {}
        for name in fields:
            field = dict.get(attributes, name, _UNSET)
            if field is _UNSET and isinstance(members.get(name), MemberDescriptorType):
                try:
                    field = members[name].__get__(value)
                except AttributeError:  # unset
                    continue
            if field is not _UNSET:
                yield field

    return read_fields


# With unused parameters to find, ranks' losses may leave different outputs out. If outputs were not joined in one
# node, a backward would not come to the layers behind such an output: their hooks, and collectives of their own
# (SyncBatchNorm), would run on some ranks only. Behind the node these layers get undefined gradients, as with torch's
# class.


class _Joined(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(clones: bool, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(output.clone() for output in outputs) if clones else outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        return tangents


class _Budget:
    """Asked of each object in an output whether it is entered no further, as a class is that pytree cannot look up.

    Containers that hold each other may have more paths than can be walked.
    """

    def __init__(self) -> None:
        self.left = 1_000_000

    def __call__(self, value: object) -> bool:
        self.left -= 1
        if self.left < 0:
            raise RecursionError
        return type(type(value)).__hash__ is not object.__hash__  # it is the program's code, or None


def join_outputs(output: Any, clones: bool) -> Any:
    """The same output, with other tensors in it where they have a graph, in the containers that torch's pytree knows.

    ``clones``: the tensors have memory of their own. The program may change them in place, and the module's stay.
    """
    if issubclass(type(output), REFERENCES):
        return type(output)(join_outputs(output.local_value(), clones)) if output.is_owner() else output
    try:
        leaves, containers = tree_flatten(output, is_leaf=_Budget())
    except RecursionError:  # torch's class raises, or walks for hours
        return output
    # isinstance() may call the program's code.
    places = [i for i, leaf in enumerate(leaves) if issubclass(type(leaf), torch.Tensor) and leaf.grad_fn is not None]
    if places:
        for i, joined in zip(places, _Joined.apply(clones, *(leaves[i] for i in places)), strict=True):
            leaves[i] = joined
    return tree_unflatten(leaves, containers)
