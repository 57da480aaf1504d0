"""What users ask about data parallelism, as equalities on 2 and 3 ranks; tutorials 01 to 05 and 09 tell the rest.

How does it work, and when does it synchronize? Mean or sum? Is it a parameter server?
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import minddp
from minddp import DistributedDataParallel
from minddp.testing import run_ranks

RANKS = pytest.mark.parametrize("world_size", [2, 3])


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def share(data: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return data.chunk(world_size)[rank]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same_everywhere(tensor: torch.Tensor, world_size: int) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(tensor, theirs) for theirs in everyone)


# --- how does it work, and when does it synchronize?


def losses_differ_and_gradients_agree(rank: int, world_size: int) -> tuple[float, float]:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    loss = ddp(torch.full((1, 1), 2.0 * (rank + 1))).sum()
    loss.backward()
    return loss.item() / ddp.module.weight.item(), ddp.module.weight.grad.item()


@RANKS
def test_each_rank_has_its_own_loss_and_the_averaged_gradient(world_size: int) -> None:
    """+2 on rank 0 and +4 on rank 1 give 3; and 4 with +6 on rank 2."""
    losses, grads = zip(*run_ranks(losses_differ_and_gradients_agree, world_size), strict=True)
    assert losses == pytest.approx([2.0 * (rank + 1) for rank in range(world_size)])
    assert grads == (world_size + 1.0,) * world_size


def replicas(rank: int, world_size: int, synchronize: bool) -> bool:
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp.require_backward_grad_sync = synchronize
        ddp(share(batch(12, step), rank, world_size)).pow(2).sum().backward()
        optimizer.step()
    return same_everywhere(weights(ddp), world_size)


@RANKS
def test_replicas_without_communication_drift_apart(world_size: int) -> None:
    assert run_ranks(replicas, world_size, True) == [True] * world_size
    assert run_ranks(replicas, world_size, False) == [False] * world_size


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(share(batch(12, step), rank, world_size)).pow(2).mean().backward()
        optimizer.step()


def resume(rank: int, world_size: int, path: str, loaders: str) -> bool:
    """A run of 6 steps, and one that is resumed from its checkpoint after 3: the same bits."""
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(ddp.parameters())
    train(ddp, optimizer, range(3), rank, world_size)
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    train(ddp, optimizer, range(3, 6), rank, world_size)

    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank + 1.0)  # a new process does not begin where the old one was
    states = [torch.load(path) if loaders == "all" or rank == 0 else None]
    if states[0] is not None:
        model.load_state_dict(states[0]["model"])
    resumed = DistributedDataParallel(model)  # carries rank 0's weights to all
    dist.broadcast_object_list(states, 0)  # optimizer state is not the wrapper's business
    again = torch.optim.Adam(resumed.parameters())
    again.load_state_dict(states[0]["optimizer"])
    train(resumed, again, range(3, 6), rank, world_size)
    return torch.equal(weights(resumed), weights(ddp))


@RANKS
@pytest.mark.parametrize("loaders", ["all", "rank 0"])
def test_a_resumed_run_ends_at_the_same_bits(world_size: int, loaders: str, tmp_path: Path) -> None:
    assert run_ranks(resume, world_size, str(tmp_path / "checkpoint.pt"), loaders) == [True] * world_size


def epochs(rank: int, world_size: int, set_epoch: bool) -> list[list[int]]:
    sampler = DistributedSampler(TensorDataset(torch.arange(12)))
    orders = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


@RANKS
def test_the_sampler_shares_out_and_needs_set_epoch(world_size: int) -> None:
    for set_epoch in (False, True):
        orders = run_ranks(epochs, world_size, set_epoch)
        for epoch in range(2):
            assert sorted(i for order in orders for i in order[epoch]) == list(range(12))
        assert all((order[0] == order[1]) == (not set_epoch) for order in orders)


# --- mean or sum? is it a parameter server?


def reductions(rank: int, world_size: int) -> None:
    data = batch(4 * world_size)
    alone = net()
    begin, end = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2  # one sample, two, and the last rank the rest
    shares = {"even": share(data, rank, world_size), "uneven": data[begin : end if rank < world_size - 1 else None]}

    def truth(mean: bool) -> list[torch.Tensor]:
        alone.zero_grad()
        losses = alone(data).pow(2).sum(1)
        (losses.mean() if mean else losses.sum()).backward()
        return gradients(alone)

    def ours(reduction: str, mean: bool, mine: torch.Tensor) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(alone), reduction=reduction)
        if reduction == "weighted":
            minddp.add_weight(ddp, len(mine))
        losses = ddp(mine).pow(2).sum(1)
        (losses.mean() if mean else losses.sum()).backward()
        return gradients(ddp)

    torch.testing.assert_close(ours("mean", True, shares["even"]), truth(mean=True))
    # Averaging summed losses: world_size times smaller than the whole batch's sum.
    torch.testing.assert_close(ours("mean", False, shares["even"]), [g / world_size for g in truth(mean=False)])
    torch.testing.assert_close(ours("sum", False, shares["even"]), truth(mean=False))
    torch.testing.assert_close(ours("sum", False, shares["uneven"]), truth(mean=False))
    torch.testing.assert_close(ours("weighted", False, shares["uneven"]), truth(mean=True))
    wrong = ours("mean", True, shares["uneven"])
    assert any(not torch.allclose(a, b) for a, b in zip(wrong, truth(mean=True), strict=True))


@RANKS
def test_which_reduction_gives_the_whole_batchs_gradient(world_size: int) -> None:
    run_ranks(reductions, world_size)


def divided(rank: int, world_size: int, value: float, factor: float | None) -> float:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).half(), predivide_factor=factor)
    ddp(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
    return float(ddp.module.weight.grad.item())


@RANKS
def test_where_the_division_is_decides_the_range(world_size: int) -> None:
    """float16 ends at 65,504: the sum of 40,000s is beyond it, their mean is not."""
    assert run_ranks(divided, world_size, 40_000.0, None) == [pytest.approx(40_000, rel=1e-2)] * world_size
    assert run_ranks(divided, world_size, 40_000.0, 1.0) == [float("inf")] * world_size  # divided after the sum
    assert run_ranks(divided, world_size, 40_000.0, 2.0) == [pytest.approx(40_000, rel=1e-2)] * world_size
    assert min(run_ranks(divided, world_size, 2e-7, None)) > 0
    assert run_ranks(divided, world_size, 2e-7, 1024.0) == [0.0] * world_size


def parameter_server(rank: int, world_size: int) -> float:
    """Rank 0 gathers gradients and sends weights, point to point; beside it the same training by allreduce."""
    served, reduced = net(), DistributedDataParallel(net())
    optimizer = torch.optim.SGD(reduced.parameters(), lr=0.1)
    for step in range(4):
        mine = share(batch(12, step), rank, world_size)
        served.zero_grad()
        served(mine).pow(2).mean().backward()
        for p in served.parameters():
            if rank == 0:
                for worker in range(1, world_size):
                    theirs = torch.empty_like(p.grad)
                    dist.recv(theirs, worker)
                    p.grad += theirs
                p.data -= 0.1 * p.grad / world_size
                for worker in range(1, world_size):
                    dist.send(p.data, worker)
            else:
                dist.send(p.grad, 0)
                dist.recv(p.data, 0)
        optimizer.zero_grad()
        reduced(mine).pow(2).mean().backward()
        optimizer.step()
    return (weights(served) - weights(reduced)).abs().max().item()


@RANKS
def test_a_parameter_server_ends_at_the_same_weights(world_size: int) -> None:
    assert max(run_ranks(parameter_server, world_size)) < 1e-14


def equivalent_training(rank: int, world_size: int) -> float:
    """b samples a rank at one learning rate: one process with world_size * b samples at the same rate."""
    alone, ddp = net(), DistributedDataParallel(net())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, alone))
    for step in range(5):
        data = batch(12, step)
        for model, optimizer, mine in ((ddp, ours, share(data, rank, world_size)), (alone, theirs, data)):
            optimizer.zero_grad()
            model(mine).pow(2).mean().backward()
            optimizer.step()
    return (weights(ddp) - weights(alone)).abs().max().item()


@RANKS
def test_training_is_that_of_one_process_with_the_whole_batch(world_size: int) -> None:
    assert max(run_ranks(equivalent_training, world_size)) < 1e-14
