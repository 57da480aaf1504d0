"""DDP over one dimension of a mesh, tensor parallelism over the other: dp2 x tp2 trains as one process does."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minddp import DistributedDataParallel
from minddp.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(inputs))))


PARAMETERS = [f"{layer}.{kind}" for layer in ("up", "down", "norm") for kind in ("weight", "bias")]


def whole(module: nn.Module, name: str) -> torch.Tensor:
    layer, _, kind = name.partition(".")
    tensor = getattr(getattr(module, layer), kind)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def train_both(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    """The largest differences after four steps, and what was warned of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = Net()
    net = copy.deepcopy(alone)
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(net, device_mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (ddp, alone)]
    for step in range(4):
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        share = inputs.chunk(2)[mesh["dp"].get_local_rank()]
        for model, optimizer, batch in ((ddp, optimizers[0], share), (alone, optimizers[1], inputs)):
            optimizer.zero_grad()
            (model(batch).square() - 0.3).square().mean().backward()
            optimizer.step()
    assert not torch.equal(alone.norm.bias, torch.zeros(8)), "nothing was trained"
    differences = {name: (whole(net, name) - whole(alone, name)).abs().max().item() for name in PARAMETERS}
    return differences, [str(warning.message) for warning in caught]


def test_two_by_two_trains_as_one_process_and_warns() -> None:
    for differences, warned in run_ranks(train_both, 4, timeout=150):
        assert max(differences.values()) < 1e-6, differences
        assert any("4 parameters are parallelized over another (up.weight" in text for text in warned), warned
