"""One program for each pain: called with the class and the rank, on two ranks.

A program returns tensors that all ranks should have alike, and raises :class:`Wrong` where numbers are not right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import minddp

WORLD = 2
Program = Callable[[Any, int], list[Tensor]]


class Wrong(Exception):
    """Nobody has raised, and the numbers are not right."""


@dataclass(frozen=True)
class Pain:
    """``torch`` and ``ours``: how it ends, of ``outcome.KINDS``; ``says``: what our error, or warning, must name."""

    title: str
    torch: str
    ours: str
    program: Program
    issues: tuple[int, ...] = ()  # of PyTorch's
    says: str = ""


PAINS: list[Pain] = []


def pain(title: str, torch: str, ours: str, *issues: int, says: str = "") -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PAINS.append(Pain(title, torch, ours, program, issues, says))
        return program

    return add


class Branches(nn.Module):
    """Three layers; the caller says which run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, *which: int) -> Tensor:
        for index in which:
            x = self.layers[index](x)
        return x


def data(rank: int) -> Tensor:
    return torch.arange(8.0).reshape(2, 4) + rank


def step(ddp: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    torch.optim.SGD(ddp.parameters(), lr=0.01).step()
    return list(ddp.parameters())


def expect_mean(parameter: Tensor, local: Tensor) -> None:
    """The gradient is the mean of what each rank's own is."""
    mean = local.clone()
    dist.all_reduce(mean)
    assert parameter.grad is not None
    if not torch.allclose(parameter.grad, mean / WORLD, rtol=1e-4, atol=1e-5):
        raise Wrong("the gradient is not the mean of the ranks' gradients")


def own_gradient(parameter: Tensor, *losses: Tensor) -> Tensor:
    """Of the sum of losses that come from the module itself, on this rank alone."""
    return torch.autograd.grad(sum(losses), [parameter])[0]  # type: ignore[arg-type]


@pain(
    "A layer that takes no part on one rank: the next forward",
    "waits", "raises", 43259, 22049, says="layers.2.weight",
)  # fmt: skip
def unfinished(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(Branches(), bucket_cap_mb=1e-6)
    for _ in range(2):
        ddp(data(rank), *([0, 1, 2] if rank == 0 else [0, 1])).sum().backward()
    return []


@pain("An unused parameter, then optimizer.step()", "differs", "raises", 128949, says="layers.2.weight")
def unused_then_step(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(Branches())
    return step(ddp, ddp(data(rank), 0, 1).square().sum())


@pain("One layer in two reentrant checkpoints", "wrong", "right", 46166, 105723)
def checkpointed_twice(wrap: Any, rank: int) -> list[Tensor]:
    class Twice(Branches):
        def forward(self, x: Tensor, *which: int) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layers[0], x, use_reentrant=True)
            return self.layers[2](self.layers[1](x))

    net = Twice()
    local = own_gradient(net.layers[0].weight, Branches.forward(net, data(rank), 0, 0, 1, 2).sum())
    ddp = wrap(net)
    ddp(data(rank).requires_grad_()).sum().backward()
    expect_mean(net.layers[0].weight, local)
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pain("Ranks that take different branches, then optimizer.step()", "differs", "raises", 40566, 72843, says="layers")
def different_branches(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(Branches(), bucket_cap_mb=1e-6)
    return step(ddp, ddp(data(rank), rank, 2).sum())


@pain("SyncBatchNorm on the CPU, and an empty batch on one rank", "raises", "right")
def sync_batch_norm(wrap: Any, rank: int) -> list[Tensor]:
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if wrap is minddp.DistributedDataParallel:
        convert = minddp.convert_sync_batchnorm
    ddp = wrap(convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    return step(ddp, ddp(data(rank)[: 2 - 2 * rank]).square().sum())


@pain("Batches of different sizes: the gradient of the whole batch", "wrong", "right", 37359, 31579)
def weighted(wrap: Any, rank: int) -> list[Tensor]:
    ours = wrap is minddp.DistributedDataParallel
    net = nn.Linear(4, 1)
    mine = data(rank)[: 2 - rank]
    whole = torch.cat([data(0)[:2], data(1)[:1]])
    truth = own_gradient(net.weight, net(whole).square().mean())
    ddp = wrap(net, **({"reduction": "weighted"} if ours else {}))
    if ours:
        minddp.add_weight(ddp, len(mine))
        ddp(mine).square().sum().backward()
    else:
        ddp(mine).square().mean().backward()
    if not torch.allclose(net.weight.grad, truth, rtol=1e-4):
        raise Wrong("a row of the smaller batch counts for more than one of the larger")
    return []


@pain(
    "Forward inside of no_sync, its backward outside of it",
    "differs", "warns", says="no_sync",
)  # fmt: skip
def forward_alone_in_no_sync(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(nn.Linear(4, 4))
    with ddp.no_sync():
        loss = ddp(data(rank)).square().sum()
    return step(ddp, loss)


@pain("static_graph and no_sync", "raises", "right", 143580)
def static_graph_no_sync(wrap: Any, rank: int) -> list[Tensor]:
    net = nn.Linear(4, 4)
    ddp = wrap(net, static_graph=True)
    with ddp.no_sync():
        ddp(data(rank)).square().sum().backward()
    local = own_gradient(net.weight, net(data(rank)).square().sum(), net(2 * data(rank)).square().sum())
    ddp(2 * data(rank)).square().sum().backward()
    expect_mean(net.weight, local)
    return []


@pain("static_graph and an output that the loss does not use", "wrong", "right", 97030, 79171)
def static_graph_unused_output(wrap: Any, rank: int) -> list[Tensor]:
    class TwoHeads(Branches):
        def forward(self, x: Tensor, *which: int) -> Any:
            return self.layers[0](x), self.layers[1](x)

    net = TwoHeads()
    ddp = wrap(net, static_graph=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(data(rank))[0].sum().backward()
    expect_mean(net.layers[0].weight, own_gradient(net.layers[0].weight, net(data(rank))[0].sum()))
    return []


@pain("A second backward of one graph", "differs", "right", 47260)
def second_backward(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(nn.Linear(4, 4))
    loss = ddp(data(rank)).square().sum()
    loss.backward(retain_graph=True)
    return step(ddp, loss)


@pain("ddp.module(x) instead of ddp(x)", "differs", "raises", says="weight")
def past_the_wrapper(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(nn.Linear(4, 4))
    step(ddp, ddp(data(rank)).square().sum())
    ddp.zero_grad()
    return step(ddp, ddp.module(data(rank)).square().sum())


@pain("A layer unfrozen after wrapping", "differs", "raises", 104336, says="layers.0.weight")
def unfrozen(wrap: Any, rank: int) -> list[Tensor]:
    net = Branches()
    net.layers[0].requires_grad_(False)
    ddp = wrap(net)
    net.layers[0].requires_grad_(True)
    return step(ddp, ddp(data(rank), 0, 1, 2).square().sum())


@pain("A head replaced after wrapping", "differs", "raises", 104336, says="weight")
def replaced(wrap: Any, rank: int) -> list[Tensor]:
    net = Branches()
    ddp = wrap(net)
    torch.manual_seed(1)
    net.layers[2] = nn.Linear(4, 4)
    return step(ddp, ddp(data(rank), 0, 1, 2).square().sum())


@pain("Models that differ between ranks", "waits", "raises", 68803, says="rank")
def different_models(wrap: Any, rank: int) -> list[Tensor]:
    wrap(nn.Linear(4, 4 + rank))
    return []


@pain("A NaN on one rank", "wrong", "raises", 90057, 124348, says="rank 1")
def a_nan(wrap: Any, rank: int) -> list[Tensor]:
    ours = wrap is minddp.DistributedDataParallel
    ddp = wrap(nn.Linear(4, 4), **({"check_finite": "raise"} if ours else {}))
    x = data(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    if any(parameter.isnan().any() for parameter in step(ddp, ddp(x).sum())):
        raise Wrong("every weight of every rank is NaN, and nobody says whose")
    return []


@pain("A replica that drifts", "differs", "raises", says="rank 1")
def drift(wrap: Any, rank: int) -> list[Tensor]:
    ours = wrap is minddp.DistributedDataParallel
    ddp = wrap(nn.Linear(4, 4), **({"check_replicas_every": 1} if ours else {}))
    for iteration in range(3):
        ddp.zero_grad()
        step(ddp, ddp(data(rank)).square().sum())
        if iteration == 1 and rank == 1:
            with torch.no_grad():
                ddp.module.weight[0, 0] += 1e-3  # a bit that flipped
    return list(ddp.parameters())


@pain("An ignored parameter of the module itself", "wrong", "right")
def ignored_at_the_root(wrap: Any, rank: int) -> list[Tensor]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    net = Scaled()
    wrap._set_params_and_buffers_to_ignore_for_model(net, ["scale"])
    local = own_gradient(net.scale, net(data(rank)).sum())
    ddp = wrap(net)
    ddp(data(rank)).sum().backward()
    if not torch.allclose(net.scale.grad, local):  # type: ignore[arg-type]
        raise Wrong("its gradient is averaged all the same")
    return []


@pain("bucket_cap_mb=-1", "wrong", "raises", says="bucket_cap_mb")
def a_cap_below_zero(wrap: Any, rank: int) -> list[Tensor]:
    wrap(nn.Linear(4, 4), bucket_cap_mb=-1)
    raise Wrong("accepted")


@pain("all_gather of different lengths, inside the graph", "dies", "right", 156627)
def uneven_gather(wrap: Any, rank: int) -> list[Tensor]:
    mine = torch.arange(2.0 + rank, requires_grad=True)
    if wrap is minddp.DistributedDataParallel:
        everything = minddp.functional.all_gather(mine)
    else:
        everything = torch.cat(torch.distributed.nn.functional.all_gather(mine))
    everything.square().sum().backward()
    if not torch.equal(mine.grad, WORLD * 2 * mine):  # type: ignore[arg-type]
        raise Wrong("the gradient is not that of the ranks' losses")
    return []


@pain("A hook that raises on one rank", "waits", "raises", says="ended its backward|division by zero")
def a_hook_raises(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(nn.Linear(4, 4))
    if rank == 1:
        ddp.module.weight.register_hook(lambda _: 1 / 0)
    return step(ddp, ddp(data(rank)).sum())


@pain("A bad batch that one rank catches and skips", "waits", "raises", says="[^ ]* exception")
def a_skipped_batch(wrap: Any, rank: int) -> list[Tensor]:
    ddp = wrap(nn.Linear(4, 4))
    for iteration in range(3):
        try:
            loss = ddp(data(rank)).sum()
            if rank == 1 and iteration == 1:
                ddp.module.weight.register_hook(lambda _: 1 / 0)
            loss.backward()
        except ZeroDivisionError:
            warnings.warn("bad batch", stacklevel=1)
    return []


@pain("ddp.to(memory_format=torch.channels_last) between two iterations, with views", "wrong", "right")
def channels_last_while_wrapped(wrap: Any, rank: int) -> list[Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2))
    ddp = wrap(net, gradient_as_bucket_view=True)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    for iteration in range(3):
        if iteration == 2:
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        local = own_gradient(net[0].weight, net(x).square().sum())
        ddp(x).square().sum().backward()
        expect_mean(net[0].weight, local)
    return []


@pain("A pipeline of two wrappers: one forward, one backward (1F1B), no_sync for all but the last", "wrong", "right")
def pipelined(wrap: Any, rank: int) -> list[Tensor]:
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    first, second = map(wrap, nets)
    sent: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward() -> None:
        hidden = first(data(rank) + len(sent))
        received = hidden.detach().requires_grad_()
        sent.append((hidden, received, second(received).square().sum()))

    def backward(batch: int) -> None:
        hidden, received, loss = sent[batch]
        loss.backward()
        hidden.backward(received.grad)

    with first.no_sync(), second.no_sync():
        forward()
        forward()
        backward(0)
    forward()
    with first.no_sync(), second.no_sync():
        backward(1)
    backward(2)
    losses = [nets[1](nets[0](data(rank) + batch)).square().sum() for batch in range(3)]
    expect_mean(nets[0].weight, own_gradient(nets[0].weight, *losses))
    return []


@pain("A parametrization registered while wrapped", "wrong", "right")
def parametrized_while_wrapped(wrap: Any, rank: int) -> list[Tensor]:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + weight.T

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = wrap(net)
    step(ddp, ddp(data(rank)).square().mean())
    register_parametrization(net[0], "weight", Symmetric())
    original = net[0].parametrizations.weight.original  # type: ignore[union-attr]
    ddp.zero_grad()
    local = own_gradient(original, net(data(rank)).square().mean())  # type: ignore[arg-type]
    ddp(data(rank)).square().mean().backward()
    expect_mean(original, local)  # type: ignore[arg-type]
    return []
