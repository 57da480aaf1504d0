"""What is found in forward's output, and that nothing of the program's runs while it is looked for."""

import collections
import dataclasses
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

import minddp
from minddp.joined_outputs import join_outputs
from minddp.outputs import find_tensors
from minddp.testing import run_ranks


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


class _Net(nn.Module):
    def __init__(self, output):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.output = nn.Linear(4, 2), output

    def forward(self, x):
        return self.output(self.layer(x).square().sum())


def _detections(y):
    return [y, *({"box": i, "score": 0.5} for i in range(3000))]


def _many(y):
    return [y, *({"score": y * 1} for _ in range(100))]


OUTPUTS = {"detections": _detections, "many": _many}
MODES = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "small": {"bucket_cap_mb_list": [1e-5] * 2},
}


def _program(name, mode):
    def run(wrap, rank):
        ddp = wrap(_Net(OUTPUTS[name]), **MODES[mode])
        seen = []
        for i in range(3):
            ddp.zero_grad()
            loss = ddp(torch.ones(3, 4) * (i + 1) + rank)
            while not isinstance(loss, torch.Tensor):
                loss = loss["loss"] if isinstance(loss, dict) else loss[0]
            loss.backward()
            seen += [p.grad.clone() for p in ddp.module.parameters()]
        return seen

    return run


def _differ(rank, world_size, names):
    warnings.simplefilter("ignore")
    found = []
    for name in names:
        for mode in MODES:
            run = _program(name, mode)
            theirs, ours = run(TorchDDP, rank), run(minddp.DistributedDataParallel, rank)
            if not all(map(torch.allclose, theirs, ours)):
                found.append((name, mode))
    return found


def test_the_same_numbers_as_with_torchs_class():
    assert run_ranks(_differ, 2, list(OUTPUTS)) == [[], []]


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
