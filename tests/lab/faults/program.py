"""The program of one rank: six steps of a small model, at one place of which one rank meets a fault."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PLACES = (
    "construction", "forward", "before the first bucket", "mid-backward", "comm hook", "finalize", "optimizer",
    "between iterations", "checkpoint",
)  # fmt: skip
FAULTS = ("killed", "stopped", "exception", "swallowed", "cut", "out of memory")
STEPS, FAULTY_STEP = 6, 3


class Planted(Exception):
    """The fault of the cells "exception" and "swallowed"."""


def digest(module: Any) -> str:
    hashed = hashlib.sha256()
    for tensor in module.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()[:16]


class Rank:
    """One rank of one cell; ``note`` collects what the harness reads afterwards from ``folder``."""

    def __init__(self, cell: dict[str, Any], rank: int, folder: Path, address: str, port: int):
        self.cell, self.rank, self.folder = cell, rank, folder
        self.address, self.port = address, port
        self.step = 0
        self.note: dict[str, Any] = {"digests": []}

    def write(self, **facts: Any) -> None:
        self.note.update(facts)
        path = self.folder / f"{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(self.note))
        path.with_suffix(".new").rename(path)

    def at(self, place: str) -> None:
        """Where this is the cell's place, the rank its faulty one and the step the third: the fault."""
        if self.cell["place"] != place or self.rank != self.cell["faulty"] or "fault_at" in self.note:
            return
        if self.step != (FAULTY_STEP if place != "construction" else 0):
            return
        self.write(fault_at=time.time())
        self._fault(self.cell["fault"])

    def _fault(self, fault: str) -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault in ("exception", "swallowed"):
            raise Planted("planted")
        elif fault == "cut":
            while not (self.folder / "cut").exists():
                time.sleep(0.01)
        elif fault == "out of memory":
            import torch

            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            torch.empty(1 << 32)

    def run(self) -> None:
        """Trains; what it raises ends the process, as in a program that does not catch."""
        try:
            self._train()
        except BaseException as error:
            self.write(raised_at=time.time(), error=f"{type(error).__name__}: {error}")
            raise
        self.write(ended_at=time.time())

    def _train(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        store = dist.TCPStore(self.address, self.port, self.cell["ranks"], self.rank == 0)
        if self.cell["backend"] == "shm":
            import minddp.shm  # noqa: F401
        dist.init_process_group(
            self.cell["backend"],
            store=store,
            rank=self.rank,
            world_size=self.cell["ranks"],
            timeout=timedelta(seconds=self.cell["group timeout"]),
        )
        dist.barrier()
        self.at("construction")
        ddp = self._wrap()
        optimizer = self._optimizer(ddp)
        while self.step < STEPS:
            try:
                self._iterate(ddp, optimizer)
            except Planted:
                if self.cell["fault"] != "swallowed":
                    raise
            self.step += 1
            self.note["digests"].append(digest(ddp.module))
            self.write()

    def _wrap(self) -> Any:
        import torch
        from torch import nn

        rank = self

        class Place(nn.Module):
            """Meets the fault in forward, or when the gradient passes in backward."""

            def __init__(self, forward: str, backward: str):
                super().__init__()
                self.places = forward, backward

            def forward(self, x: Any) -> Any:
                rank.at(self.places[0])
                y = x * 1.0
                y.register_hook(lambda grad: rank.at(self.places[1]))
                return y

        net = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), Place("forward", "mid-backward"), nn.Linear(32, 32), nn.Tanh(),
            nn.Linear(32, 8), Place("", "before the first bucket"),
        )  # fmt: skip
        arguments: dict[str, Any] = {"bucket_cap_mb_list": [0.001] * 2}
        if self.cell["class"] == "torch":
            wrapper: Callable[..., Any] = torch.nn.parallel.DistributedDataParallel
        else:
            import minddp

            wrapper = minddp.DistributedDataParallel
        try:
            ddp = wrapper(net, **arguments)
        except Planted:
            raise
        if self.cell["place"] in ("comm hook", "finalize"):
            ddp.register_comm_hook(None, self._hook())
        return ddp

    def _hook(self) -> Callable[[Any, Any], Any]:
        import torch.distributed as dist

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # both classes look at annotations, each for its own
            if bucket.index() == 1:
                self.at("comm hook")
            buffer = bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(buffer, async_op=True).get_future()

            def finish(done: Any) -> Any:
                if bucket.is_last():
                    self.at("finalize")
                return done.value()[0]

            return future.then(finish)

        return hook

    def _optimizer(self, ddp: Any) -> Any:
        import torch

        rank = self

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                rank.at("optimizer")
                return super().step(closure)

        return SGD(ddp.parameters(), lr=0.1)

    def _iterate(self, ddp: Any, optimizer: Any) -> None:
        import torch

        self.at("between iterations")
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        ddp(torch.randn(4, 16, generator=generator)).square().sum().backward()
        optimizer.step()
        if self.step == FAULTY_STEP and self.rank == self.cell["faulty"]:
            self.at("checkpoint")
            torch.save(ddp.module.state_dict(), self.folder / "checkpoint.pt")
