"""What forward returns is of the program's own: many small things, shared children, values that load on access.

The same numbers as with torch's class, in the modes in which that does not look into outputs itself; and nobody's
code is run.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minddp
from minddp.testing import run_ranks
from tests.programs.beside_torch import MODES, those_that_differ

UNSEEN = {mode: MODES[mode] for mode in ("default", "views", "small", "small views")}  # torch walks no outputs


class Loads(Mapping):
    def __init__(self, loss):
        self._loss = loss

    def __getitem__(self, key):
        raise OSError("no such file")

    def __iter__(self):
        raise OSError("no such file")

    def __len__(self):
        return 1


class LoadingDict(dict):
    def values(self):
        raise OSError("no such file")

    __iter__ = items = __getitem__ = values


class LoadingList(list):
    def __iter__(self):
        raise OSError("no such file")


@dataclass
class Slotted:
    __slots__ = ("loss", "other")
    loss: Any
    other: Any


@dataclass
class Computed:
    _loss: Any
    later: Any = field(init=False)

    @property
    def loss(self):
        return self._loss


@dataclass
class Guarded:
    loss: Any

    def __getattribute__(self, name):
        raise OSError("no such file")


def guarded(loss):
    output = object.__new__(Guarded)
    object.__setattr__(output, "loss", loss)
    return [loss, output]


def _raises(self):
    raise OSError("no such file")


Computed.later = property(_raises)  # a field that stands for one, as in lazy datasets


def shared(loss, depth=24):
    """2 ** depth paths."""
    both = [loss]
    for _ in range(depth):
        both = [both, both]
    return both


def chain(loss, depth=3000):
    for _ in range(depth):
        loss = (loss,)
    return loss


def ring(loss):
    inside: list[Any] = [loss]
    inside.append(inside)
    return inside


KINDS = {
    "detections": lambda loss: {
        "detections": [{"box": torch.ones(4), "label": 1} for _ in range(3000)],
        "loss": loss,
    },
    "shared": shared,
    "chain": chain,
    "ring": ring,
    "mapping": Loads,
    "dict": lambda loss: LoadingDict(loss=loss),
    "list": lambda loss: LoadingList([loss]),
    "slots": lambda loss: Slotted(loss, None),
    "computed": lambda loss: Computed(loss),
    "guarded": guarded,
    "ordered": lambda loss: collections.OrderedDict(loss=loss),
}


class Net(nn.Module):
    """Leaves its loss where the program finds it, and returns it in something of ``kind``."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        self.loss = checkpoint(self.b, self.a(x).tanh(), use_reentrant=True).square().sum()
        return KINDS[self.kind](self.loss)


class Trains:
    """A program, by the name of what its module returns."""

    def __init__(self, kind):
        self.kind = self.__name__ = kind

    def __call__(self, cls, rank, **args):
        ddp, seen = cls(Net(self.kind), **args), []
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for i in range(3):
            optimizer.zero_grad()
            ddp(torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * i + rank)))
            ddp.module.loss.backward()
            seen += [p.grad.clone() for p in ddp.parameters()]
            optimizer.step()
        return seen


def test_the_numbers_are_torchs():
    assert not those_that_differ([Trains(kind) for kind in KINDS], 2, UNSEEN)


def _alone(rank, world_size):
    """The modes in which torch's class hangs or raises on such outputs."""
    seen = {}
    for kind in KINDS:
        one, two = ([g.tolist() for g in Trains(kind)(minddp.DistributedDataParallel, rank, **args)]
                    for args in ({}, {"find_unused_parameters": True}))  # fmt: skip
        seen[kind] = one == two
    return seen


def test_with_unused_parameters_to_find():
    assert all(all(seen.values()) for seen in run_ranks(_alone, 2))
