"""SyncBatchNorm without a process group: plain batch norm, conversion, state dicts, errors."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from minddp.functional.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm


class OwnGroup(dist.ProcessGroup):
    """A group whose class is in Python: torch's tables need not hold it."""


A_GROUP = OwnGroup(0, 1)


class Twice(nn.Module):
    """The same layer under two names, and inside a child as well."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.again = self.first
        self.child = nn.Sequential(nn.Linear(3, 3), self.first, nn.BatchNorm1d(3, affine=False))
        self.missing = None


def test_conversion_keeps_what_the_layer_had():
    layer = nn.BatchNorm2d(3, eps=1e-3, momentum=None)
    layer.qconfig = "some qconfig"
    layer.note = "mine"
    calls = []
    handle = layer.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward"))
    layer.eval()
    new = convert_sync_batchnorm(layer, process_group=A_GROUP)
    assert type(new) is SyncBatchNorm
    assert (new.eps, new.momentum, new.qconfig, new.note, new.training) == (
        1e-3,
        None,
        "some qconfig",
        "mine",
        False,
    )
    assert new.process_group is A_GROUP
    assert not hasattr(layer, "process_group")
    assert new.weight is layer.weight
    assert new.running_var is layer.running_var
    new.train()(torch.randn(2, 3, 2, 2, requires_grad=True)).sum().backward()
    assert calls == [SyncBatchNorm, "backward"]
    handle.remove()
    new(torch.randn(2, 3, 2, 2))
    assert calls.count(SyncBatchNorm) == 1


def test_conversion_of_a_tree():
    model = Twice()
    names = list(model.state_dict())
    same = convert_sync_batchnorm(model)
    assert same is model
    assert model.first is model.again is model.child[1]
    assert [type(layer) for layer in model.child] == [nn.Linear, SyncBatchNorm, SyncBatchNorm]
    assert model.child[2].weight is None
    assert list(model.state_dict()) == names
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), SyncBatchNorm)
    again = convert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(2), SyncBatchNorm(2)), A_GROUP)
    assert [type(layer) for layer in again] == [SyncBatchNorm] * 2
    assert [layer.process_group for layer in again] == [A_GROUP, A_GROUP]


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return torch.relu(super().forward(x))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_conversion_refuses_what_it_would_break():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Activated(2)))
    with pytest.raises(ValueError, match=r"'1\.0' \(Activated\) has a forward of its own"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match=r"LazyBatchNorm1d is lazy"):
        convert_sync_batchnorm(nn.LazyBatchNorm1d())
    layer = nn.BatchNorm1d(2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    with pytest.raises(ValueError, match="is parametrized"):
        convert_sync_batchnorm(layer)
    lazy = nn.LazyBatchNorm1d()
    lazy(torch.randn(2, 3))
    assert isinstance(convert_sync_batchnorm(lazy), SyncBatchNorm)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: convert_sync_batchnorm(None), "convert_sync_batchnorm: module must be .* got NoneType"),
        (lambda: convert_sync_batchnorm(nn.BatchNorm1d(2), 3), "convert_sync_batchnorm: process_group must .* got 3"),
        (lambda: SyncBatchNorm(2, process_group=3), "SyncBatchNorm: process_group must be .* got 3"),
    ],
)
def test_what_is_no_module_or_group_is_named(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_state_dicts_load_both_ways():
    trained = nn.BatchNorm2d(3)
    trained(torch.randn(4, 3, 2, 2))
    ours = SyncBatchNorm(3)
    ours.load_state_dict(trained.state_dict())
    theirs = nn.SyncBatchNorm(3)
    theirs.load_state_dict(ours.state_dict())
    back = nn.BatchNorm2d(3)
    back.load_state_dict(theirs.state_dict())
    for name, value in trained.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)
    assert back.state_dict()._metadata == ours.state_dict()._metadata


def test_without_a_group_it_is_batch_norm():
    x = torch.randn(4, 3, 5)
    ours, plain = SyncBatchNorm(3), nn.BatchNorm1d(3)
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.running_var, plain.running_var)
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert "3, eps=1e-05" in repr(ours)


def test_copies_and_pickles():
    layer = SyncBatchNorm(3, bias=False)
    layer.reset_parameters()
    for twin in (copy.deepcopy(layer), saved_and_loaded(layer)):
        assert twin.bias is None
        assert torch.equal(twin.weight, layer.weight)
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    # PyTorch's wrapper refuses its own class on CPU by this very check.
    assert not isinstance(layer, nn.SyncBatchNorm)


def saved_and_loaded(layer):
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize(
    "x, text",
    [
        (torch.randn(3), r"expected an \(N, C, \.\.\.\) input"),
        (torch.randn(2, 4), "expected 3 channels in dimension 1"),
        (torch.ones(2, 3, dtype=torch.long), "expected a floating-point input"),
    ],
)
def test_bad_inputs(x, text):
    for layer in (SyncBatchNorm(3), SyncBatchNorm(3).eval()):
        with pytest.raises(ValueError, match=text):
            layer(x)
