"""Rebinds names so that tests written for GPUs run on the CPU: nothing in them needs a GPU but the gate.

``"cuda"``, ``"cuda:N"`` and a bare rank as a device mean the CPU; streams, events, ``set_device`` and
``synchronize`` do nothing; the backend ``"nccl"`` means ``"gloo"``; ``device_ids`` and ``output_device``
are dropped; the decorators that skip for want of GPUs let every test through.
:func:`open_gates` must run before the module with the tests is imported, because that module binds the
decorators by name; :func:`rebind` after it, because what it imports compiles functions that mention the
rebound names.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch

_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_SKIPS_WITH_ARGUMENTS = (
    *("nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "requires_nccl"),
    *("requires_nccl_version", "skip_if_lt_x_gpu"),
)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, int) and not isinstance(device, bool)) or (
        isinstance(device, str) and device.startswith("cuda")
    )


def _to_cpu(device: Any) -> Any:
    return "cpu" if _is_gpu(device) else device


def _without_gpu_keyword(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _to_without_gpu(method: Any) -> Any:
    """For ``.to``: a device can also come first, by position; an int there can only be a device."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _without_gpu_keyword(method)(self, *map(_to_cpu, args), **kwargs)

    return call


def _without_devices(method: Any) -> Any:
    """For ``DistributedDataParallel.__init__``: its 2nd and 3rd parameter are dropped."""

    @functools.wraps(method)
    def call(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        method(self, module, None, None, *args, **kwargs)

    return call


class _Nothing(contextlib.AbstractContextManager[Any]):
    """Stands for a stream, an event, a device guard: any method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _rebind_devices() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _without_gpu_keyword(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _to_without_gpu(owner.to)
        owner.cuda = lambda self, *args, **kwargs: self


def _rebind_cuda() -> None:
    import torch.testing._internal.common_device_type  # looks for devices when it is imported

    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    nothings = {
        torch.cuda: ("Event", "Stream", "current_stream", "device", "stream"),
        torch: ("Event", "Stream"),
        torch.accelerator: ("current_stream",),
    }
    for owner, names in nothings.items():
        for name in names:  # a class each: torch.compile keeps a table by class
            setattr(owner, name, type(name, (_Nothing,), {}))
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 8  # one or more for every rank


def _rebind_groups() -> None:
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh

    new_group, init_device_mesh = dist.new_group, device_mesh.init_device_mesh

    @functools.wraps(new_group)
    def new_group_of_gloo(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return new_group(*args, **kwargs)

    dist.new_group = new_group_of_gloo
    device_mesh.init_device_mesh = lambda device, *args, **kwargs: init_device_mesh(_to_cpu(device), *args, **kwargs)


class _CoarseConv2d(torch.nn.Conv2d):
    """Strides by 4 where the test says nothing: test_ddp_uneven_inputs convolves images of a megapixel with
    256 channels a hundred times, hours on a CPU, and does not look at what comes out."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"stride": 4, **kwargs})


def open_gates() -> None:
    """The decorators that want GPUs do nothing any more, and neither does PyTorch's own timeout."""
    import torch.testing._internal.common_distributed as common

    def let_through(*args: Any, **kwargs: Any) -> Any:
        return decorate

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    for name in _SKIPS_WITH_ARGUMENTS:
        setattr(common, name, let_through)
    common.skip_if_no_gpu = decorate
    common.get_timeout = lambda test_id: math.inf


def rebind(ddp_class: type) -> None:
    """Rebinds all the other names in this process, for good; ``ddp_class`` is the class under test."""
    _rebind_devices()
    _rebind_cuda()
    _rebind_groups()
    torch.nn.Conv2d = _CoarseConv2d
    ddp_class.__init__ = _without_devices(ddp_class.__init__)
