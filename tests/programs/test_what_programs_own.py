"""Wrappers, tensors, optimizers and layers that are the program's own, or another library's: the same numbers as with
torch's class."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

import minddp
from tests.programs import beside_torch
from tests.programs.beside_torch import MODES, those_that_differ
from tests.programs.test_own_classes import Two, batch, trained

# --- wrappers


def names_taken_before(cls, rank, **args):
    """By a mixin, before torch's constructor writes its own there."""

    class Logs:
        def __init__(self, *inputs, **kwargs):
            self.logger, self.reducer = "the program's", None
            super().__init__(*inputs, **kwargs)

    class Own(Logs, cls):
        pass

    own = Own(Two(), **args)
    assert own.reducer is not None and own.logger != "the program's"
    return trained(own, rank)


def wrappers_without_a_hash(cls, rank, **args):
    @dataclass(init=False)
    class Own(cls):
        factor: float

        def __init__(self, module, factor):
            super().__init__(module, **args)
            self.factor = factor

        def forward(self, x):
            return self.factor * super().forward(x)

        def let_go(self, what):
            raise AssertionError

    return trained(Own(Two(), 2.0), rank)


# --- optimizers


def a_hook_for_one_step(cls, rank, **args):
    ddp = cls(Two(), **args)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), 0.1), []
    once = optimizer.register_step_pre_hook(lambda *_: once.remove())
    for i in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        optimizer.step()
        seen.append(torch.tensor(len(optimizer._optimizer_step_pre_hooks)))
    return [*seen, *(p.detach() for p in ddp.parameters())]


class _Groups(torch.optim.Optimizer):
    """Keeps pairs of names and parameters."""

    def __init__(self, module):
        super().__init__(module.parameters(), {})
        self.param_groups = [{"params": list(module.named_parameters())}, {"names": "none"}]

    def step(self, closure=None):
        with torch.no_grad():
            for _, p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad


def groups_of_another_shape(cls, rank, **args):
    ddp = cls(Two(), **args)
    optimizer = _Groups(ddp.module)
    optimizer.zero_grad = ddp.zero_grad
    return beside_torch.trained(ddp, rank, optimizer=optimizer)


class _KeepsClosures(torch.optim.SGD):
    def step(self, closure):
        kept = weakref.ref(closure)
        assert kept() is closure
        copy.copy(closure)()
        copy.deepcopy(closure)()
        return super().step(closure)


def closures_that_are_copied(cls, rank, **args):
    ddp = cls(Two(), **args)
    optimizer = _KeepsClosures(ddp.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = ddp(batch(rank)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(2)]
    return losses + [p.detach() for p in ddp.parameters()]


# --- tensors

_ATEN = torch.ops.aten


class Codes(torch.Tensor):
    """A quantized weight: written by ``copy_``; whatever else is done with it sees its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values):
        scale = values.abs().max() / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def values(self):
        return self.codes.float() * self.scale

    def receive(self, values):
        new = type(self).of(values)
        self.codes.copy_(new.codes)
        self.scale.copy_(new.scale)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.values() if isinstance(value, Codes) else value

        if func is _ATEN.copy_.default and isinstance(args[0], Codes):
            return args[0].receive(plain(args[1]).reshape(args[0].shape))
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return cls(args[0].codes, args[0].scale)
        if func is _ATEN.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scale)
        return func(*tree_map(plain, args), **(kwargs or {}))


class _Adapted(Two):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.base = nn.Parameter(Codes.of(torch.randn(4, 4)), requires_grad=False)

    def forward(self, x):
        return super().forward(x @ self.base.values())


def frozen_weights_that_are_quantized(cls, rank, **args):
    """Which each rank has drawn itself: rank 0's count."""
    return trained(cls(_Adapted(rank), **args), rank)


class Unit(torch.Tensor):
    unit = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.cat and len({value.unit for value in args[0]}) > 1:
            raise TypeError("units differ")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Measured(Two):
    def __init__(self):
        super().__init__()
        for name in ("metre", "second"):
            value = torch.ones(4).as_subclass(Unit)
            value.unit = name
            self.register_buffer(name, value)

    def forward(self, x):
        return super().forward(x * self.metre.as_subclass(torch.Tensor))


def buffers_with_units(cls, rank, **args):
    return trained(cls(_Measured(), **args), rank)


def frozen_with_another_dtype_of_gradients(cls, rank, **args):
    net = _Adapted(0)
    net.base = nn.Parameter(torch.eye(4, dtype=torch.bfloat16), requires_grad=True)
    net.base.grad_dtype = torch.float32
    net.base.requires_grad_(False)
    net.base.values = lambda: net.base.detach().float()
    return trained(cls(net, **args), rank)


# --- layers that DistributedDataParallel is to leave alone


class _Ignores(Two):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(self.inner(x))


def an_ignored_layer_with_another_name(cls, rank, **args):
    """As torch.compile(layer) gives it one."""
    net = _Ignores()
    cls._set_params_and_buffers_to_ignore_for_model(net, ["inner.weight", "inner.bias"])
    ddp = cls(net, **args)
    net.inner = checkpoint_wrapper(net.inner, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if cls is minddp.DistributedDataParallel:
        minddp.refresh(ddp)
    return [*trained(ddp, rank), *(p.grad for p in net.inner.parameters())]


def an_ignored_layer_that_fsdp_shards(cls, rank, **args):
    net = _Ignores()
    fully_shard(net.inner, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    cls._set_params_and_buffers_to_ignore_for_model(net, ["inner.weight", "inner.bias"])
    ddp = cls(net, **args)
    optimizer = torch.optim.SGD(net.inner.parameters(), 0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        seen += trained(ddp, rank, 1)
        optimizer.step()
        seen += [p.to_local().detach().clone() for p in net.inner.parameters()]
    return seen


def local_sgd_with_a_penalty(cls, rank, **args):
    """The hook leaves gradients local, and what the penalty adds to them went past the wrapper."""
    ddp = cls(Two(), **args)
    state = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for i in range(4):
        optimizer.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        (0.01 * sum(p.square().sum() for p in ddp.module.parameters())).backward()
        optimizer.step()
    return [p.detach() for p in ddp.parameters()]


class FromNumpy(torch.autograd.Function):
    """A gradient that numpy has computed: the program keeps the array."""

    kept: list[numpy.ndarray] = []

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        FromNumpy.kept.append(x.numpy().T @ gradient.numpy())
        return None, torch.from_numpy(FromNumpy.kept[-1])


def gradients_in_memory_of_numpys(cls, rank, **args):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))

        def forward(self, x):
            return FromNumpy.apply(x, self.weight)

    FromNumpy.kept = []
    ddp = cls(Layer(), **args)
    seen = []
    for i in range(4):
        ddp.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        seen += [torch.from_numpy(array.copy()) for array in FromNumpy.kept]
    return seen


def a_reducer_that_is_told_of_one_tensor(cls, rank, **args):
    ddp = cls(Two(), **args)
    with ddp.no_sync():
        loss = ddp(batch(rank)).square().sum()
    ddp.reducer.prepare_for_backward(loss)
    loss.backward()
    return [p.grad for p in ddp.parameters()]


def thirds_in_half_precision(cls, rank, **args):
    """A parameter alone in its bucket, and a sparse one."""
    seen = []
    for module in (nn.Linear(4, 2, bias=False), nn.Embedding(7, 4, sparse=True)):
        torch.manual_seed(0)
        module.reset_parameters()
        ddp = cls(module.bfloat16(), **args)
        for i in range(3):
            ddp.zero_grad()
            x = batch(rank, i).bfloat16() if isinstance(module, nn.Linear) else batch(rank, i).abs().long()
            ddp(x).sum().backward()
            seen.append(module.weight.grad.to_dense().double() * 1e3)
    return seen


PROGRAMS = [
    names_taken_before, wrappers_without_a_hash, a_hook_for_one_step, groups_of_another_shape,
    closures_that_are_copied, frozen_weights_that_are_quantized, buffers_with_units,
    frozen_with_another_dtype_of_gradients, an_ignored_layer_with_another_name, an_ignored_layer_that_fsdp_shards,
    local_sgd_with_a_penalty, gradients_in_memory_of_numpys, a_reducer_that_is_told_of_one_tensor,
]  # fmt: skip


def test_the_numbers_are_torchs():
    assert not those_that_differ(PROGRAMS, 2, {"default": {}, "views": MODES["views"]})


def test_means_over_three_ranks_are_rounded_once():
    assert not those_that_differ([thirds_in_half_precision], 3, {"default": {}, "views": MODES["views"]})
