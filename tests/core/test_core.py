"""The core beside torch's class: same program, same numbers, and the same order of collectives on all ranks."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp import events


class Branches(nn.Module):
    """``right`` is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.left(x))
        return found + self.right(x) if both else found


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(ddp: Any, rank: int, unused: bool = False, accumulates: bool = False) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        if accumulates:
            with ddp.no_sync():
                ddp(_batch(rank, 20 + step)).square().sum().backward()
        ddp(_batch(rank, step), both=not unused or step % 2 == 0).square().sum().backward()
        optimizer.step()


def _uneven(ddp: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            ddp(_batch(rank, step)).square().sum().backward()
            optimizer.step()


def _hooked(ddp: Any, rank: int) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    _train(ddp, rank)


PROGRAMS: list[tuple[dict[str, Any], Callable[[Any, int], None]]] = [
    ({}, _train),
    ({"bucket_cap_mb": 1e-5}, _train),
    ({"find_unused_parameters": True}, lambda ddp, rank: _train(ddp, rank, unused=True)),
    ({"static_graph": True}, _train),
    ({}, lambda ddp, rank: _train(ddp, rank, accumulates=True)),
    ({}, _uneven),
    ({}, _hooked),
]


def _both(rank: int, path: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for arguments, program in PROGRAMS:
        torch.manual_seed(rank)  # the constructor gives all ranks rank 0's values
        net = Branches()
        finals = []
        for kind in (TorchDDP, minddp.DistributedDataParallel):
            ddp = kind(copy.deepcopy(net), **arguments)
            program(ddp, rank)
            finals.append([value.clone() for value in ddp.module.state_dict().values()])
        for theirs, ours in zip(*finals, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    _raises(rank)
    dist.barrier()
    dist.destroy_process_group()


def _raises(rank: int) -> None:
    with pytest.raises(RuntimeError, match="models differ"):
        minddp.DistributedDataParallel(nn.Linear(2, 2 + rank))
    with pytest.raises(TypeError, match="no_such_argument"):
        minddp.DistributedDataParallel(nn.Linear(2, 2), no_such_argument=None)


def test_same_programs_same_numbers_as_with_torchs_class() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_both, (os.path.join(folder, "store"),), 2)


def test_observers_are_called_at_what_they_override() -> None:
    calls: list[str] = []

    class Printer(events.Observer):
        name = "printer"

        def before_forward(self, joining: bool) -> None:
            calls.append(f"forward {self.averager.reducer.iteration()}")

        def buckets_changed(self, reducer: Any) -> None:
            calls.append("buckets")

    events.register(Printer)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ddp = minddp.DistributedDataParallel(Branches())
        assert "printer" in ddp._minddp_observers.names()
        for step in range(2):
            ddp(_batch(0, step)).sum().backward()
        assert calls[0] == "forward 0" and "buckets" in calls
    finally:
        events.unregister("printer")
        dist.destroy_process_group()


def test_arguments_of_a_companion_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Painter(events.Observer):
        name = "painter"
        options = {"color": "red"}

    events.register(Painter)
    try:
        assert events.parse({"color": "blue"})["painter"] == {"color": "blue"}
        monkeypatch.setenv("MINDDP_WITHOUT", "painter")
        assert "painter" not in events.parse({"color": "red"})  # it asks for nothing
        with pytest.raises(TypeError, match="leaves out the companion 'painter', which has the argument 'color'"):
            events.parse({"color": "blue"})
    finally:
        events.unregister("painter")
