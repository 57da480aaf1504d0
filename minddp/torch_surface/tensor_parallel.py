"""A module whose parameters are sharded over another dimension of the mesh (DTensors), made fit for data parallelism.

Between forwards each of them is an ordinary parameter under its own name: this rank's shard, which is hooked, reduced
and stepped. A forward sees the DTensor around it. State dicts hold DTensors, as those of the module did before it was
wrapped, and loading takes them.

Torch's class leaves the DTensors in the module after its first forward, where neither ``parameters()`` nor
``state_dict()`` finds them.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..messages import global_ranks, ranks_text


class _Shard(NamedTuple):
    """``holder`` has the parameter ``local`` under ``name``; the rest says which DTensor that is a part of."""

    holder: nn.Module
    name: str
    local: nn.Parameter
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(self.mesh, self.placements).to_local()


_MADE_BEFORE = (
    "optimizer.step(): the optimizer was made before DistributedDataParallel, whose gradients go to this rank's "
    "shards of tensor-parallel parameters: make it after wrapping, from ddp.parameters()."
)
_replaced = WeakIdKeyDictionary()  # the DTensors, which no optimizer may step any more


@cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, *_: Any) -> None:
    groups = () if torch.compiler.is_compiling() else optimizer.param_groups
    if any(p in _replaced for group in groups if isinstance(group, dict) for p in group.get("params", ())):
        raise RuntimeError(_MADE_BEFORE)


def localize(module: nn.Module, group: dist.ProcessGroup, reduced: set[int]) -> None:
    """Does nothing where no parameter is a DTensor.

    Args:
        module: the module to wrap.
        group: over which gradients are averaged.
        reduced: ``id`` of each parameter that is not to be ignored.

    Raises:
        ValueError: one is sharded over ranks of ``group``, whose gradients belong to different parts.
    """
    dtensors = [(name, p) for name, p in module.named_parameters() if isinstance(p, DTensor) and id(p) in reduced]
    if not dtensors:
        return
    ranks = global_ranks(group)
    averaged = set() if ranks is None else set(ranks) - {dist.get_rank()}
    for name, parameter in dtensors:
        shared = averaged & set(parameter.device_mesh.mesh.flatten().tolist())
        if shared and any(placement.is_shard() for placement in parameter.placements):
            raise ValueError(
                f"DistributedDataParallel: parameter '{name}' is sharded over {ranks_text(sorted(shared))}, with "
                "which it would be averaged: pass as device_mesh= (or process_group=) the dimension over which it is "
                "not."
            )
    _look_at_steps()
    LocalShards(module, reduced)


class LocalShards:
    """Replaces DTensors among ``reduced`` by this rank's shards, but for the module's forwards and its state dicts.

    Lives as long as the module's hooks. An optimizer that was given the DTensors is refused.
    """

    def __init__(self, module: nn.Module, reduced: set[int]):
        self._shards: list[_Shard] = []
        self._depth = 0
        locals_by_id: dict[int, nn.Parameter] = {}
        for holder in module.modules():
            for name, parameter in list(holder._parameters.items()):
                if isinstance(parameter, DTensor) and id(parameter) in reduced:
                    local = locals_by_id.get(id(parameter))
                    if local is None:
                        local = locals_by_id[id(parameter)] = _localized(parameter)
                        _replaced[parameter] = True
                    spec = (parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
                    self._shards.append(_Shard(holder, name, local, *spec))
                    holder._parameters[name] = local
        module.register_forward_pre_hook(self._show, prepend=True)
        module.register_forward_hook(self._hide, always_call=True)
        for holder in dict.fromkeys(shard.holder for shard in self._shards):
            holder.register_state_dict_post_hook(partial(LocalShards._to_whole, self))  # which takes attributes
            holder.register_load_state_dict_pre_hook(self._to_parts)

    def _show(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            wholes: dict[int, DTensor] = {}
            for shard in self._shards:
                whole = wholes.setdefault(id(shard.local), shard.whole(shard.local))
                shard.holder._parameters[shard.name] = whole  # type: ignore[assignment]

    def _hide(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for shard in self._shards:
                shard.holder._parameters[shard.name] = shard.local

    def _to_whole(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for shard in self._shards:
            if shard.holder is module and prefix + shard.name in state:
                state[prefix + shard.name] = shard.whole(state[prefix + shard.name])

    def _to_parts(self, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for shard in self._shards:
            if shard.holder is module and prefix + shard.name in state:
                state[prefix + shard.name] = shard.part(state[prefix + shard.name])


def _localized(parameter: DTensor) -> nn.Parameter:
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    if isinstance(parameter.grad, DTensor):
        local.grad = parameter.grad.to_local()
    if local.requires_grad:
        local.register_hook(_arrived)
    return local


def _arrived(grad: torch.Tensor) -> torch.Tensor:
    """A functional collective's result may be under way."""
    wait = getattr(grad, "wait", None)
    return grad if wait is None else wait()
