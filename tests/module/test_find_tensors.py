"""What is found in forward's output, and that nothing of the program's runs while it is looked for."""

import collections
import dataclasses
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.checkpoint import checkpoint

import minddp
from minddp.outputs import find_tensors, join_outputs
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import MODES, batch, gradients, those_that_differ


def grown() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    loss: object
    rest: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    loss: object
    rest: object


class Items(list):
    def __iter__(self):
        raise RuntimeError("loads")

    __getitem__ = __len__ = __iter__


class Values(dict):
    def values(self):
        raise RuntimeError("loads")

    __iter__ = __getitem__ = __len__ = items = keys = values


@dataclasses.dataclass
class Guarded:
    loss: object

    def __getattribute__(self, name):
        raise RuntimeError("raises")


@dataclasses.dataclass
class Property:
    loss: object

    @property
    def __class__(self):
        raise RuntimeError("raises")


def _raises(self):
    raise RuntimeError("raises")


class Kind(type):
    def __eq__(cls, other):  # so it has no __hash__
        raise RuntimeError("raises")


@dataclasses.dataclass
class OfAKind(metaclass=Kind):
    """Without a text dataclass() would compare the class."""

    loss: object


class Opaque(type):
    def __getattribute__(cls, name):
        raise RuntimeError("raises")

    __hash__ = _raises


class OfAnOpaqueKind(metaclass=Opaque):
    pass


@dataclasses.dataclass
class Computed:
    _loss: object
    later: object = dataclasses.field(init=False)


Computed.later = property(_raises)  # a field that stands for one, as in lazy datasets


def guarded(y):
    output = object.__new__(Guarded)
    object.__setattr__(output, "loss", y)
    return output


CONTAINERS = {
    "tensor": lambda y: y,
    "list": lambda y: [0, y],
    "pair": lambda y: Pair(1, y),
    "ordered": lambda y: collections.OrderedDict(a=y),
    "set": lambda y: {y, 1},
    "frozenset": lambda y: frozenset([y]),
    "dataclass": lambda y: Output(y),
    "slots": lambda y: Slots(None, [y]),
    "nested": lambda y: Output("name", {"a": ([y],)}),
    "parameter": lambda y: [nn.Parameter(torch.ones(1)), y][1:],
    "items": lambda y: Items([y]),
    "values": lambda y: Values(a=y),
    "guarded": guarded,
    "property": lambda y: [Property(1), y],
    "computed": lambda y: Computed([y]),
    "of a kind": lambda y: OfAKind(y),
    "opaque": lambda y: (OfAnOpaqueKind(), y),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tensor_is_found_and_no_code_of_the_programs_runs(name):
    y = grown()
    found = find_tensors(CONTAINERS[name](y))
    assert len(found) == 1 and found[0] is y
    joined, _ = join_outputs([y, CONTAINERS[name](y)], clones=False)
    assert joined is not y and torch.equal(joined, y)


def test_each_is_found_once_in_what_is_shared_or_contains_itself():
    shared = y = grown()
    for _ in range(40):
        shared = [shared, shared]
    assert find_tensors(shared) == [y, y]  # as often as the innermost list, which is entered once, holds it
    around = [y]
    around.append({"around": around})
    assert find_tensors(around) == [y]


def test_depth_costs_no_recursion():
    y = deep = grown()
    for _ in range(100_000):
        deep = (deep,)
    assert find_tensors(deep) == [y]
    while isinstance(deep, tuple):
        (deep,) = deep


def test_where_none_requires_a_gradient_one_is_found():
    plain = torch.ones(1)
    assert find_tensors([plain, torch.ones(1)]) == [plain]
    y = grown()
    assert [found is y for found in find_tensors([plain, y])] == [True]
    assert find_tensors([1, "a", None, object(), range(3), Output]) == []


def test_unset_fields_are_passed_over():
    output = Slots.__new__(Slots)
    output.rest = y = grown()
    assert find_tensors(output) == [y]
    without = Output(y)
    del without.__dict__["loss"]
    assert find_tensors(without) == []


def shared(y, depth=24):
    """2 ** depth paths."""
    for _ in range(depth):
        y = [y, y]
    return y


def chain(y, depth=3000):
    for _ in range(depth):
        y = (y,)
    return y


def ring(y):
    inside = [y]
    inside.append(inside)
    return inside


class Loads(collections.abc.Mapping):
    def __init__(self, y):
        self._loss = y

    __getitem__ = __iter__ = _raises

    def __len__(self):
        return 1


WALKED_BY_TORCH = {
    "detections": lambda y: [y, *({"box": torch.ones(4), "score": 0.5} for _ in range(3000))],
    "many": lambda y: [y, *({"score": y * 1} for _ in range(100))],
}
KINDS = {**CONTAINERS, **WALKED_BY_TORCH, "shared": shared, "chain": chain, "ring": ring, "mapping": Loads}


class Net(nn.Module):
    """Leaves its loss where the program finds it, and returns it in something of ``kind``."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.a(x).tanh()
        walked = self.kind in WALKED_BY_TORCH  # with unused parameters to find its class takes no reentrant one
        y = self.b(hidden) if walked else checkpoint(self.b, hidden, use_reentrant=True)
        self.loss = y.square().sum()
        return KINDS[self.kind](self.loss)


class Trains:
    """A program, by the name of what its module returns."""

    def __init__(self, kind):
        self.kind = self.__name__ = kind

    def __call__(self, cls, rank, **args):
        ddp, seen = cls(Net(self.kind), **args), []
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for i in range(1 if self.kind == "shared" else 3):  # to give up its paths takes seconds
            optimizer.zero_grad()
            loss = ddp(batch(rank, i))
            while self.kind in WALKED_BY_TORCH and not isinstance(loss, torch.Tensor):
                loss = loss[0]
            (loss if self.kind in WALKED_BY_TORCH else ddp.module.loss).backward()
            seen += gradients(ddp)
            optimizer.step()
        return seen


def test_the_same_numbers_as_with_torchs_class():
    """Of all kinds in the modes in which that walks no outputs."""
    unseen = {mode: MODES[mode] for mode in ("default", "views", "small", "small views")}
    assert not those_that_differ([Trains(kind) for kind in KINDS], 2, unseen)
    assert not those_that_differ([Trains(kind) for kind in WALKED_BY_TORCH], 2, MODES)


@on_ranks(2)
def test_with_unused_parameters_to_find(rank, world_size):
    """In which torch's class hangs or raises on such outputs."""
    for kind in KINDS:
        one, two = (
            Trains(kind)(minddp.DistributedDataParallel, rank, **args)
            for args in ({}, {"find_unused_parameters": True})
        )
        assert all(map(torch.equal, one, two)), kind


def test_64_detections_take_at_most_torchs_time():
    """As an object detector returns them. The least of many times each, in turns."""
    detections = [{name: grown() for name in ("boxes", "labels", "scores", "masks")} for _ in range(64)]
    ways = {find_tensors: [], lambda output: list(_find_tensors(output)): []}
    for _ in range(200):
        for find, seconds in ways.items():
            begin = time.perf_counter()
            assert len(find(detections)) == 256
            seconds.append(time.perf_counter() - begin)
    ours, torchs = map(min, ways.values())
    assert ours <= torchs
