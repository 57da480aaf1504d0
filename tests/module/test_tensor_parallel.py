"""DDP over one dimension of a mesh, tensor parallelism over the other: dp2 x tp2 trains as one process does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(inputs))))


NAMES = [f"{layer}.{kind}" for layer in ("up", "down", "norm") for kind in ("weight", "bias")]
SHARDED = NAMES[:4]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def parallelized(net: nn.Module) -> tuple[nn.Module, object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}), mesh["dp"]


def train(model: nn.Module, share: tuple[int, int], steps: range = range(4)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs.chunk(share[1])[share[0]]).square() - 0.3).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@on_ranks(4, timeout=900)
def test_two_by_two_trains_as_one_process(rank: int, world_size: int, options: dict[str, object]) -> None:
    """The largest difference after four steps."""
    torch.manual_seed(0)
    alone = Net()
    net, mesh = parallelized(copy.deepcopy(alone))
    names = list(net.state_dict())
    ddp = DistributedDataParallel(net, device_mesh=mesh, **options)
    train(ddp, (mesh.get_local_rank(), 2))
    train(alone, (0, 1))
    assert not torch.equal(alone.norm.bias, torch.zeros(8)), "nothing was trained"
    assert [name for name, _ in ddp.module.named_parameters()] == names == NAMES
    state = ddp.module.state_dict()
    assert list(state) == names
    assert [name for name in names if isinstance(state[name], DTensor)] == SHARDED
    assert max(float((whole(state[name]) - p).abs().max()) for name, p in alone.state_dict().items()) < 1e-6


@on_ranks(4, timeout=900)
def test_a_state_dict_resumes(rank: int, world_size: int) -> None:
    """A state dict from the middle, loaded into another wrapper: the same as an unbroken run, bit for bit."""
    torch.manual_seed(0)
    start = Net()
    net, mesh = parallelized(copy.deepcopy(start))
    share = (mesh.get_local_rank(), 2)
    unbroken = DistributedDataParallel(net, device_mesh=mesh)
    train(unbroken, share)
    state = copy.deepcopy(unbroken.state_dict())
    train(unbroken, share, range(4, 6))
    again = DistributedDataParallel(parallelized(Net())[0], device_mesh=mesh)
    again.load_state_dict(state)
    train(again, share, range(4, 6))
    bare = parallelized(Net())[0]  # the state of a wrapper fits the module that was not wrapped
    bare.load_state_dict(again.module.state_dict())
    first, *others = ([*map(whole, module.state_dict().values())] for module in (unbroken.module, again.module, bare))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@on_ranks(4, timeout=900)
def test_what_cannot_work_is_named(rank: int, world_size: int) -> None:
    net, mesh = parallelized(Net())
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net, device_mesh=mesh)
    ddp(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="optimizer was made before DistributedDataParallel"):
        early.step()
    with pytest.raises(ValueError, match=r"parameter 'up.weight' is sharded over ranks? .*pass as device_mesh="):
        DistributedDataParallel(parallelized(Net())[0], process_group=dist.group.WORLD)

    def fails(module: nn.Module, inputs: object) -> None:
        raise KeyError("in forward")

    handle = ddp.module.down.register_forward_pre_hook(fails)
    with pytest.raises(KeyError):
        ddp(torch.ones(2, 8))
    handle.remove()
    assert [name for name, _ in ddp.module.named_parameters()] == NAMES  # a forward that raised leaves nothing behind
    ddp(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()


@on_ranks(4, timeout=900)
def test_a_replicated_parameter_has_the_whole_gradient(rank: int, world_size: int) -> None:
    """The norm is replicated over tp, each of whose ranks sees a part of the sequence."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor import Replicate, Shard

    plan = {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    net = parallelize_module(copy.deepcopy(alone), mesh["tp"], plan)
    net = parallelize_module(net, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
    ddp = DistributedDataParallel(net, device_mesh=mesh["dp"])
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    ddp(x.chunk(2)[dp].chunk(2, 1)[tp]).square().mean().backward()
    alone(x).square().mean().backward()
    grads = {name: p.grad for name, p in ddp.module.named_parameters()}
    for kind in ("weight", "bias"):
        assert float((grads[f"0.{kind}"] - getattr(alone[0], kind).grad).abs().max()) < 1e-6
