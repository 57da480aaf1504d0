"""The class between torch's DistributedDataParallel and ours, so that nothing of torch's runs by inheritance.

Ours derives from torch's for ``isinstance`` alone. Code in the wild that looks past ours, such as a subclass's
``super(DistributedDataParallel, self).__init__()`` (mmengine's MMSeparateDistributedDataParallel), means what
comes after torch's class: ``torch.nn.Module`` and ``Joinable``. It finds that here.

What always holds: of every function and property of torch's class this one has another of the same name: the one
of the classes after torch's if they have one; otherwise one that raises, or that a companion has put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

__all__ = ["TorchBase"]


class TorchBase(_TorchDDP):
    """Torch's DistributedDataParallel by type, a bare ``torch.nn.Module`` and ``Joinable`` by what it does.

    Raises:
        TypeError: arguments are given, as from ``torch.nn.Module``.
        NotImplementedError: from a step inside torch's class that has no counterpart here.
    """

    def __init__(self) -> None:
        super(_TorchDDP, self).__init__()
        Joinable.__init__(self)

    def train(self, mode: bool = True) -> Any:
        """A module behind may have a ``train`` that returns nothing."""
        super(_TorchDDP, self).train(mode)
        return self


def _left_out(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is a step inside torch's own DDP; minddp has no such step")

    method.__name__ = name
    return method


def _that_comes_after(name: str) -> Callable[..., Any]:
    """Torch's class calls ``super()``: a module that stands behind it among a class's bases comes before Module."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(_TorchDDP, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _in_the_place_of(name: str, value: Any) -> Any:
    """What the classes after torch's have under ``name``, or what raises."""
    for base in _TorchDDP.__mro__[1:]:
        if name in vars(base):
            return _that_comes_after(name) if base is torch.nn.Module else vars(base)[name]
    return property(_left_out(name)) if isinstance(value, property) else _left_out(name)


for _name, _value in list(vars(_TorchDDP).items()):
    _runs = callable(_value) or isinstance(_value, (property, classmethod, staticmethod))
    if _runs and _name not in vars(TorchBase):
        setattr(TorchBase, _name, _in_the_place_of(_name, _value))


def fill(names: type, owner: type = TorchBase) -> None:
    """Gives the wrapper what is defined in ``names``, under torch's names, in the place of what raises; or another
    class, ``owner``."""
    for name, value in vars(names).items():
        if name not in ("__module__", "__doc__", "__dict__", "__weakref__", "__qualname__"):
            setattr(owner, name, value)
