"""Which parameters a module has.

A program's own class may say anything in ``named_parameters()``: leave a child out, yield a parameter twice, or one
that is registered nowhere. What trains has to be found all the same, each parameter once, or replicas drift apart
without a word. Torch asks each of ``named_modules()`` for what is its own; here both are asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

Named = tuple[str, torch.nn.Parameter]


def all_parameters(module: torch.nn.Module) -> list[Named]:
    """Each parameter once, with its first name: what the module's ``named_parameters()`` yields, and then what each
    of its ``named_modules()`` says to have itself."""
    named: dict[int, Named] = {}
    for name, parameter in itertools.chain(module.named_parameters(), of_each_module(module, itself=False)):
        named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def of_each_module(module: torch.nn.Module, itself: bool = True) -> Iterator[Named]:
    """What each of the ``named_modules()`` says to have itself: a parameter of several modules several times.
    ``itself=False``: not ``module``, if its ``named_parameters()`` is torch's own: it has been asked already."""
    for prefix, child in module.named_modules():
        if child is module and not itself and type(child).named_parameters is torch.nn.Module.named_parameters:
            continue
        try:
            own = list(child.named_parameters(recurse=False))
        except TypeError:  # a method of its own, which cannot be asked for that
            own = list(torch.nn.Module.named_parameters(child, recurse=False))
        yield from _prefixed(prefix, own)


def registered(module: torch.nn.Module, prefix: str = "", above: tuple[torch.nn.Module, ...] = ()) -> Iterator[Named]:
    """Every parameter that a module or one below it holds, under all its names, whatever their methods tell."""
    if isinstance(module, torch.jit.ScriptModule):  # its methods are nobody's own
        yield from _prefixed(prefix, torch.nn.Module.named_parameters(module, remove_duplicate=False))
        return
    yield from _prefixed(prefix, ((name, p) for name, p in module._parameters.items() if p is not None))
    for name, child in module._modules.items():
        if child is not None and not any(child is other for other in above):
            yield from registered(child, f"{prefix}.{name}" if prefix else name, (*above, module))


def _prefixed(prefix: str, named: Iterable[Named]) -> Iterator[Named]:
    return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in named)


def every_name(module: torch.nn.Module) -> Iterator[Named]:
    """Every parameter under every name; a tied one has several."""
    return itertools.chain(module.named_parameters(), registered(module), all_parameters(module))
