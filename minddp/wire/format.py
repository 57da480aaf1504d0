"""How a wrapper's gradients travel between ranks: what ``wire=`` and ``ordered=`` come to.

A gradient that travels in fewer bytes is rounded twice: when it is sent, and when its sum is sent. The rank that has
summed a piece uses what it has sent of it, so all ranks end with the same bits. Sums are taken in float32, in the
order of ranks (``csrc/wire/ordered_allreduce.h``). The shared-memory transport sums so by itself.

Vectors (biases, norms' weights) are few bytes, and often of another magnitude than the rest: they travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._C import wire as native
from ..functions import averager_of
from ..messages import is_torchs
from . import DTYPES, Wire

BLOCK, BLOCK_BYTES = 256, 260
_DEVICE_CHUNK_BYTES = 8 << 20
WireState = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]
_CHUNK_BYTES = 1 << 20  # at most; larger ones: less of a bucket's sums and transfers overlap
# By process group and type of device: wrappers share one, as they share the group's order of collectives.
_made: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Layout(NamedTuple):
    """How a gradient lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Residual:
    """What rounding has lost of one gradient: blocks of codes, as they travel (uint8), in its memory order."""

    layout: Layout
    blocks: torch.Tensor


@dataclass
class WireFormat:
    """What one wrapper's gradients travel as, and what that has lost.

    Args:
        wire: as given.
        ordered: sums must not depend on the transport, nor on the plan of buckets.
        group: the wrapper's.
        sends_alone: a group of one rank is gone through, too.

    Attributes:
        residuals: error feedback, by parameter. A new plan of buckets keeps them; another memory format begins anew.
    """

    wire: Wire | None
    ordered: bool
    group: Any
    sends_alone: bool = False
    residuals: dict[torch.Tensor, Residual] = field(default_factory=dict)

    @property
    def is_in_force(self) -> bool:
        """One rank sends nothing, unless it is told to."""
        sends = self.group.size() > 1 or self.sends_alone
        return (self.wire is not None or self.ordered) and bool(sends)

    def dtypes(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sparse: Sequence[bool],
        plain: Sequence[torch.dtype],
    ) -> list[torch.dtype]:
        """By parameter, that of the buffer; ``plain`` without ``wire=``.

        Raises:
            ValueError: a gradient cannot travel so; names the parameter.
        """
        wire = self.wire
        if wire is None:
            return list(plain)
        return [
            p.dtype if is_sparse or not _shrinks(name, p, wire) else DTYPES[wire.dtype]
            for name, p, is_sparse in zip(names, parameters, sparse)
        ]

    def cases(self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """For the C++ reducer. Collective at the first call for a group. REQUIRES: :attr:`is_in_force`.

        Raises:
            ValueError: parameters or group do not go with it.
        """
        wire, device = self.wire, parameters[0].device
        on_host = device.type == "cpu"
        ordered = _ordered(self.group, self._argument, device, wire is not None and wire.dtype == "int8")
        found: list[Any] = []
        if wire is not None and torch.uint8 in dtypes:
            feeds_back = [dtype == torch.uint8 and wire.error_feedback for dtype in dtypes]
            self.residuals = {p: self._residual(p) for p, feeds in zip(parameters, feeds_back) if feeds}
            known = [self.residuals.get(p) for p in parameters]
            blocks = [None if residual is None else residual.blocks for residual in known]
            found.append(native.QuantizedBuckets(blocks))
        if wire is not None and wire.dtype == "fp16" and on_host:  # looking at the values waits for a device
            found.append(native.HalfBuckets())
        if ordered is not None:
            found.append(native.OrderedSums(ordered))
        return found

    def forget_losses(self) -> None:
        """Begins error feedback anew: a step was skipped, since its gradients were not finite, and what rounding has
        lost of them could be of any size."""
        for residual in self.residuals.values():
            residual.blocks.zero_()

    @property
    def _argument(self) -> str:
        return "ordered=True" if self.wire is None else f"wire={self.wire.dtype!r}"

    def _residual(self, parameter: torch.Tensor) -> Residual:
        known = self.residuals.get(parameter)
        if known is not None and known.layout == _layout(parameter) and known.blocks.device == parameter.device:
            return known
        nbytes = -(-parameter.numel() // BLOCK) * BLOCK_BYTES
        blocks = torch.zeros(nbytes, dtype=torch.uint8, device=parameter.device)
        return Residual(_layout(parameter), blocks)

    def follow_layouts(self) -> None:
        """New buckets take gradients as they lie now: error feedback in another memory order begins anew."""
        for parameter, residual in self.residuals.items():
            if residual.layout != _layout(parameter):
                residual.layout = _layout(parameter)
                residual.blocks.zero_()


def _layout(parameter: torch.Tensor) -> Layout:
    strides = torch.empty_like(parameter, device="meta").stride()
    if strides != parameter.stride():  # it has gaps
        strides = torch.empty(parameter.shape, device="meta").stride()
    return Layout(tuple(parameter.shape), strides)


def _shrinks(name: str, parameter: torch.Tensor, wire: Wire) -> bool:
    if parameter.dim() < 2:
        return False
    if not parameter.is_floating_point():
        raise ValueError(
            f"wire={wire.dtype!r}: parameter {name!r} is {_name(parameter.dtype)}, and only real gradients travel in "
            "fewer bytes: leave wire out."
        )
    dtype = DTYPES[wire.dtype]
    if dtype != parameter.dtype and dtype.itemsize >= parameter.dtype.itemsize:
        raise ValueError(
            f"wire={wire.dtype!r} takes as many bytes as the gradient of {name!r}, which is "
            f'{_name(parameter.dtype)}: leave wire out, or use wire="int8".'
        )
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ordered(group: Any, argument: str, device: torch.device, quantized: bool) -> Any:
    """The group's all-reduce in the order of ranks; None: its own is one. Collective where it is made."""
    on_host = device.type == "cpu"
    backend = _backend_name(group, device)
    if backend is None or (on_host and backend not in ("gloo", "shm")):
        wanted = 'the CPU backend "gloo" or "shm"' if on_host else f"a backend for {device.type}"
        raise ValueError(
            f"{argument} needs a process group of torch's own with {wanted}; this one is "
            f"{backend or type(group).__name__}. Pass another process_group=, from torch.distributed.new_group()."
        )
    if backend == "shm" and not quantized:
        return None
    made = _made.setdefault(group, {})
    if device.type not in made:
        if on_host:
            scatters, gathers = (_companion(group, purpose) for purpose in ("scatters", "gathers"))
            made[device.type] = native.OrderedAllreduce.on_host(scatters, gathers, _CHUNK_BYTES)
        else:
            made[device.type] = native.OrderedAllreduce.on_device(group, _DEVICE_CHUNK_BYTES)
    return made[device.type]


def _backend_name(group: Any, device: torch.device) -> str | None:
    """None: there is none for such a device."""
    if not is_torchs(group):
        return None
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return str(getattr(backend, "wrapped_pg", backend).name()).lower()


def _companion(group: Any, purpose: str) -> Any:
    """A Gloo backend of the group's ranks. No process group: that would count among the program's own."""
    store = dist.PrefixStore(f"minddp/{purpose}", dist.distributed_c10d._world.pg_map[group][1])
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), native.cpu_timeout(group))


def wire_state(ddp: torch.nn.Module) -> WireState:
    """This rank's error feedback of ``wire="int8"``, by parameter name: shape, strides, and blocks of codes.

    A block is 256 int8 codes and their float32 scale, in the order of the gradient's memory: 260 uint8.
    ``state_dict()`` has none of it, as with torch's class. Save it on every rank, between iterations, to go on
    with the same bits. A copied or unpickled wrapper begins without.
    """
    return {name: (*mine.layout, mine.blocks.clone()) for name, mine in _residuals(ddp, "wire_state").items()}


def load_wire_state(ddp: torch.nn.Module, state: WireState) -> None:
    """Goes on from what :func:`wire_state` gave on this rank. Between iterations; without it, from zero.

    Raises:
        TypeError: ``state`` is no dictionary.
        KeyError, ValueError: it is another model's, in another memory format, or no such state; names the parameter.
            Nothing is loaded then.
    """
    residuals = _residuals(ddp, "load_wire_state")
    if not isinstance(state, Mapping):
        raise TypeError(
            "minddp.load_wire_state: state must be what minddp.wire_state(ddp) returned on this rank, a dictionary "
            f"by parameter name, got {state!r:.200}"
        )
    found = {name: _blocks(state, name, residual) for name, residual in residuals.items()}
    for name, residual in residuals.items():  # in place: the reducer keeps its tensors
        residual.blocks.copy_(found[name])


def _blocks(state: WireState, name: str, mine: Residual) -> torch.Tensor:
    """Those of parameter ``name`` in ``state``, if they fit ``mine``."""
    if name not in state:
        raise KeyError(f"wire state: nothing for parameter {name!r}")
    try:
        shape, strides, given = state[name]
        layout = Layout(tuple(map(int, shape)), tuple(map(int, strides)))
        blocks = given.to(mine.blocks.device)
        scales = blocks.view(-1, BLOCK_BYTES)[:, BLOCK:].contiguous().view(torch.float32)
        are_numbers = bool((scales.isfinite() & ~scales.signbit()).all())
    except (TypeError, ValueError, AttributeError, RuntimeError):
        raise ValueError(f"wire state: what it has for parameter {name!r} is not from minddp.wire_state") from None
    if layout != mine.layout:
        raise ValueError(f"wire state: parameter {name!r} has {layout} there and {mine.layout} here")
    if (blocks.dtype, blocks.shape) != (torch.uint8, mine.blocks.shape):
        raise ValueError(f"wire state: what it has for parameter {name!r} is not from minddp.wire_state")
    if not are_numbers:
        raise ValueError(f"wire state: what it has for parameter {name!r} holds scales that are not finite numbers")
    return blocks


def _residuals(ddp: torch.nn.Module, function: str) -> dict[str, Residual]:
    averager = averager_of(ddp, function)
    observer, parameters = averager.observers.get("wire"), averager.parameters
    names = dict(zip(parameters.reduced, parameters.names))
    return {} if observer is None else {names[p]: residual for p, residual in observer.format.residuals.items()}
