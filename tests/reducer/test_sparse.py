"""Sparse gradients on real ranks: their sum is minddp's own, over all-gathers, since no backend's can be used."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minddp import DistributedDataParallel
from tests.on_ranks import all_alike, on_ranks

# Which rows each rank looks up; a rank may look up none.
ROWS = {
    "overlapping": [[1, 2, 2], [2, 3], [0]],
    "nothing on one rank": [[1, 4], [], [4]],
    "nothing anywhere": [[], [], []],
    "all the same": [[3], [3], [3]],
}


class Tables(nn.Module):
    """Two sparse tables and two dense layers, so that sparse and dense buckets are under way together."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.first = nn.Embedding(5, 3, sparse=True, dtype=dtype)
        self.a = nn.Linear(3, 3, dtype=dtype)
        self.second = nn.Embedding(5, 3, sparse=True, dtype=dtype)
        self.b = nn.Linear(3, 3, dtype=dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.first(rows)) * self.second(rows))


def loss_of(model: nn.Module, rows: list[int]) -> torch.Tensor:
    return model(torch.tensor(rows, dtype=torch.long)).abs().pow(2).sum()


@on_ranks(2)
def test_a_sparse_gradient_whose_numbers_are_nowhere(rank: int, world_size: int) -> None:
    """One of torch's zero tensors counts as zeros; memory that the program has given up is named."""
    net = Tables()
    ddp = DistributedDataParallel(net)

    def without_values(grad: torch.Tensor) -> torch.Tensor:
        zeros = torch._efficientzerotensor(grad._values().shape)
        return torch.sparse_coo_tensor(grad._indices(), zeros, grad.shape, check_invariants=False)

    hook = net.first.weight.register_hook(without_values)
    loss_of(ddp, [1, 2]).backward()
    assert net.first.weight.grad is not None and not net.first.weight.grad.to_dense().any()
    hook.remove()

    def gives_up(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad._values().untyped_storage().resize_(0)

    net.zero_grad()
    net.second.weight.register_post_accumulate_grad_hook(gives_up)
    with pytest.raises(RuntimeError, match=f"'second.weight' has 0 bytes of memory, expected 24.*rank {rank}"):
        loss_of(ddp, [1, 2]).backward()


@pytest.mark.parametrize(
    "dtype, backend, reduction",
    [
        (torch.float32, "gloo", "mean"),
        (torch.float64, "gloo", "sum"),
        (torch.float32, "shm", "mean"),
    ],
)
@on_ranks(2, 3)
def test_sparse_gradients_are_averaged(
    rank: int, world_size: int, dtype: torch.dtype, backend: str, reduction: str
) -> None:
    torch.manual_seed(0)
    group = dist.new_group(backend=backend)
    net = Tables(dtype)
    alone = copy.deepcopy(net)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb_list=[1e-5] * 2, reduction=reduction)
    for name, rows in ROWS.items():
        for _ in range(2):
            ddp.zero_grad()
            loss_of(ddp, rows[rank]).backward()
        alone.zero_grad()
        for theirs in rows[:world_size]:
            loss_of(alone, theirs).backward()
        averaged = {key: p.grad for key, p in net.named_parameters()}
        for key, p in alone.named_parameters():
            assert p.grad is not None
            truth = p.grad.to_dense() / (world_size if reduction == "mean" else 1)
            torch.testing.assert_close(averaged[key].to_dense(), truth, msg=lambda m, k=key: f"{name}, {k}: {m}")
            assert averaged[key].is_sparse == p.grad.is_sparse


@pytest.mark.parametrize("steps", [100, pytest.param(400, marks=pytest.mark.all)])
@on_ranks(2)
def test_sparse_beside_dense_buckets_step_after_step(rank: int, world_size: int, steps: int) -> None:
    """Gloo's own sparse all-reduce corrupts the heap here, sooner or later."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tables(), bucket_cap_mb_list=[1e-5] * 2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, [(step + rank) % 5, step % 5]).backward()
        optimizer.step()
    assert all_alike(*ddp.parameters())
