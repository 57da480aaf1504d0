"""join() with SyncBatchNorm in the model: even inputs train, uneven ones end on all ranks at once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp import DistributedDataParallel
from minddp.functional.sync_batchnorm import convert_sync_batchnorm
from tests.ranks_pool import run_ranks

ROWS = 3


class Net(nn.Module):
    """One norm is called twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Conv2d(4, 4, 1)
        self.last = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.norm(self.mix(x)).mean((2, 3))
        return self.head(self.last(x))


def data(steps, world_size):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(steps, world_size, ROWS, 1, 6, 6, generator=generator)
    return x, torch.randint(3, (steps, world_size, ROWS), generator=generator)


def make():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def one_process(steps, world_size, accumulate):
    """Every step, the whole batch of all ranks."""
    net, optimizer = make()
    x, target = data(steps, world_size)
    for step in range(steps):
        F.cross_entropy(net(x[step].flatten(0, 1)), target[step].flatten()).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def joined(rank, world_size, counts, accumulate=1, cls=DistributedDataParallel, norms=True, throw=False, **options):
    """Trains on ``counts[rank]`` batches: the wrapper, and what ended it."""
    net, optimizer = make()
    ddp = cls(convert_sync_batchnorm(net) if norms else net, bucket_cap_mb_list=[1e-4] * 2, **options)
    optimizer.param_groups[0]["params"] = list(ddp.parameters())
    weighted = options.get("reduction") == "weighted"
    x, target = data(max(counts), world_size)
    try:
        with ddp.join(throw_on_early_termination=throw):
            for step in range(counts[rank]):
                if weighted:
                    minddp.add_weight(ddp, ROWS)
                ddp.require_backward_grad_sync = (step + 1) % accumulate == 0
                output = ddp(x[step, rank])
                F.cross_entropy(output, target[step, rank], reduction="sum" if weighted else "mean").backward()
                if ddp.require_backward_grad_sync:
                    optimizer.step()
                    optimizer.zero_grad()
    except RuntimeError as error:
        return ddp, str(error)
    return ddp, ""


def _even(rank, world_size, accumulate, options):
    ddp, error = joined(rank, world_size, [4] * world_size, accumulate, **options)
    assert not error
    return ddp.module.state_dict()


@pytest.mark.parametrize(
    "accumulate, options",
    [
        (1, {}),
        (1, {"gradient_as_bucket_view": True}),
        (2, {}),
        (1, {"reduction": "weighted"}),
        (1, {"find_unused_parameters": True}),
    ],
)
def test_even_inputs_equal_the_whole_batch(accumulate, options):
    truth = one_process(4, 2, accumulate)
    for state in run_ranks(_even, 2, accumulate, options):
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _uneven(rank, world_size, counts, options):
    """The error, and how often the first norm was called before. After it the ranks go on together."""
    ddp, error = joined(rank, world_size, counts, **options)
    calls = int(ddp.module.norm.num_batches_tracked)
    ddp.require_backward_grad_sync = True
    fresh = DistributedDataParallel(copy.deepcopy(ddp.module))
    x, _ = data(1, world_size)
    for wrapper in (ddp, fresh):
        wrapper.zero_grad()
        wrapper(x[0, rank]).square().sum().backward()
    torch.testing.assert_close(ddp.module.head.weight.grad, fresh.module.head.weight.grad)
    return error, calls


@pytest.mark.parametrize(
    "counts, out_of_data, options",
    [
        ((4, 2), "rank 1 is", {}),
        ((4, 2), "rank 1 is", {"accumulate": 2}),
        ((4, 0), "rank 1 is", {"gradient_as_bucket_view": True}),
        ((2, 3), "rank 0 is", {"static_graph": True}),
        ((1, 3), "rank 0 is", {"find_unused_parameters": True}),
        ((1, 3, 1), "ranks 0, 2 are", {}),
    ],
)
def test_uneven_inputs_raise_on_all_ranks_at_the_first_forward_without_a_rank(counts, out_of_data, options):
    for error, calls in run_ranks(_uneven, len(counts), counts, options):
        assert f"join(): {out_of_data} out of data" in error and "SyncBatchNorm 'norm' and 1 more such" in error
        assert calls == 2 * min(counts)


def _thrown(rank, world_size, cls, norms):
    return joined(rank, world_size, (3, 1), cls=cls, norms=norms, throw=True)[1]


def test_throw_on_early_termination_is_torchs():
    expected = run_ranks(_thrown, 2, TorchDDP, False)  # torch's SyncBatchNorm needs GPUs
    assert all(expected) and run_ranks(_thrown, 2, DistributedDataParallel, True) == expected


def _norms_that_are_frozen(rank, world_size, cls, kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[1].eval()
    net = nn.Sequential(kind(net))
    ddp = cls(net)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for i in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(torch.full((3, 4), i + rank + 1.0)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in ddp.parameters()]


class Answers(nn.Module):
    """Every name, as some wrappers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self._modules["net"](x)

    def __getattr__(self, name):
        return {name}


class Raises(Answers):
    def __getattr__(self, name):
        raise KeyError(name)


def test_norms_in_eval_mode_wait_for_nobody():
    torchs = run_ranks(_norms_that_are_frozen, 2, TorchDDP, nn.Sequential)  # its SyncBatchNorm needs GPUs
    converts = (nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm)
    for kind in (*converts, Answers, Raises):
        ours = run_ranks(_norms_that_are_frozen, 2, DistributedDataParallel, kind)
        torch.testing.assert_close(ours, torchs)
