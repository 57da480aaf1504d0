"""join() with SyncBatchNorm in the model: a rank out of data takes part with an empty batch."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minddp import DistributedDataParallel
from minddp.sync_batchnorm import convert_sync_batchnorm
from minddp.testing import RankError, run_ranks

ROWS = 3


class Net(nn.Module):
    """One norm is called twice; an argument may come by keyword, and outputs are nested."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Conv2d(4, 4, 1)
        self.last = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x, *, scale):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.norm(self.mix(x)).mean((2, 3))
        return {"logits": [self.head(self.last(x * scale))]}


def data(steps, world_size):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(steps, world_size, ROWS, 1, 6, 6, generator=generator)
    return x, torch.randint(3, (steps, world_size, ROWS), generator=generator)


def loss_of(net, x, target, reduction="mean"):
    return F.cross_entropy(net(x, scale=torch.tensor(2.0))["logits"][0], target, reduction=reduction)


def make():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def one_process(counts, accumulate):
    """Every step, the whole batch of the ranks that still have data."""
    net, optimizer = make()
    x, target = data(max(counts), len(counts))
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        loss_of(net, x[step, active].flatten(0, 1), target[step, active].flatten()).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def joined(rank, world_size, counts, accumulate, options):
    net, optimizer = make()
    ddp = DistributedDataParallel(convert_sync_batchnorm(net), bucket_cap_mb_list=[1e-4] * 2, **options)
    optimizer.param_groups[0]["params"] = list(ddp.parameters())
    weighted = options.get("reduction") == "weighted"
    x, target = data(max(counts), world_size)
    hooks = len(net._forward_pre_hooks)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(counts[rank]):
            if weighted:
                ddp.add_weight(ROWS)
            ddp.require_backward_grad_sync = (step + 1) % accumulate == 0
            loss_of(ddp, x[step, rank], target[step, rank], "sum" if weighted else "mean").backward()
            if ddp.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
        ddp.require_backward_grad_sync = True
    assert len(net._forward_pre_hooks) == hooks
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return net.state_dict()


@pytest.mark.parametrize(
    "counts, accumulate, options",
    [
        ((4, 2), 1, {}),
        ((4, 0), 1, {"gradient_as_bucket_view": True}),
        ((1, 3, 4), 1, {}),
        ((4, 2), 2, {}),
        ((3, 1), 1, {"reduction": "weighted"}),
        ((3, 1), 1, {"find_unused_parameters": True}),
    ],
)
def test_equals_the_whole_batch_of_those_with_data(counts, accumulate, options):
    truth = one_process(counts, accumulate)
    for state in run_ranks(joined, len(counts), counts, accumulate, options):
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


class NeedsRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        if len(x) == 0:
            raise IndexError("no rows")
        return self.norm(x)


def refuses_empty_batches(rank, world_size):
    ddp = DistributedDataParallel(convert_sync_batchnorm(NeedsRows()))
    with ddp.join():
        for _ in range(1 + rank):
            ddp(torch.randn(2, 2)).sum().backward()


def test_a_model_that_cannot_take_an_empty_batch_is_named():
    with pytest.raises(RankError) as caught:
        run_ranks(refuses_empty_batches, 2, timeout=20, grace=2)
    assert "runs the model on an empty batch" in caught.value.failures[0]
    assert "no rows" in caught.value.failures[0]


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


class Flagged(NeedsRows):
    def forward(self, x, flag):
        return self.norm(x)


class RunsWhereItIsRead:
    def __reduce__(self):
        return print, ("executed",)


def has_never_seen_a_batch(rank, world_size, other_input):
    ddp = DistributedDataParallel(convert_sync_batchnorm(Flagged()))
    with ddp.join():
        for _ in range(rank):
            ddp(torch.randn(2, 2), other_input()).sum().backward()


@pytest.mark.parametrize(
    "other_input, why",
    [
        (Unpicklable, "cannot be passed on (TypeError: not this one)"),
        (RunsWhereItIsRead, "cannot be passed on (they are more than tensors and plain containers)"),
    ],
)
def test_inputs_that_cannot_be_described_are_named(other_input, why, capfd):
    with pytest.raises(RankError) as caught:
        run_ranks(has_never_seen_a_batch, 2, other_input, timeout=20, grace=2)
    assert why in caught.value.failures[0]
    assert "executed" not in capfd.readouterr().out


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor


class TakesRows(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.kind = nn.Linear(2, 2), nn.BatchNorm1d(2), kind

    def forward(self, rows):
        x = {"tensor": lambda: rows, "dataclass": lambda: rows.x, "mapping": lambda: rows["x"]}[self.kind]()
        return self.norm(self.linear(x))


def _trained_unevenly(rank, world_size, kind):
    make = {"tensor": lambda x: x, "dataclass": Rows, "mapping": lambda x: UserDict(x=x)}[kind]
    ddp = DistributedDataParallel(convert_sync_batchnorm(TakesRows(kind)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for i in range(1 + rank):
            optimizer.zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * i + rank))
            ddp(make(x)).pow(3).sum().backward()
            optimizer.step()
    return [p.detach() for p in ddp.module.parameters()]


def test_no_row_of_a_joined_rank_counts_however_it_is_wrapped():
    expected = run_ranks(_trained_unevenly, 2, "tensor")
    for kind in ("dataclass", "mapping"):
        torch.testing.assert_close(run_ranks(_trained_unevenly, 2, kind), expected)


def _rank_one_alone_has_data(rank, world_size):
    ddp = DistributedDataParallel(convert_sync_batchnorm(Flagged()))
    with ddp.join():
        for _ in range(rank):
            mask = torch.ones(2, dtype=torch.bool)
            ddp(torch.randn(2, 2), {"name": "a", "mask": (mask, [None, 1.5])}).sum().backward()
    return True


def test_plain_containers_of_tensors_are_passed_on():
    assert run_ranks(_rank_one_alone_has_data, 2) == [True, True]
