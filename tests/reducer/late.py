"""A process group in Python of two ranks, of which there is one: an all-reduce doubles, late, on a stream of its own.

The other rank has this one's gradients, so the averages are what the program has without any wrapper. Where a wait is
missing, what is read is half of them. One rank over NCCL cannot show that: NCCL launches nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CYCLES = 20_000_000  # that a CUDA device sleeps before each collective: some 10 ms. The fake one draws its order


class LateWork(dist.Work):
    """Over when the side stream has come to its end: whoever waits has the current stream wait.

    Args:
        blocks: waiting for it would block the host, as NCCL's does under TORCH_NCCL_BLOCKING_WAIT.
    """

    def __init__(self, tensors: list[Tensor], side: torch.Stream | None, futures_order: bool, blocks: bool = False):
        super().__init__()
        self._blocks = blocks
        self._end = None if side is None else side.record_event()
        self._future: Any = torch.futures.Future(devices=[side.device] if side is not None and futures_order else [])
        if side is None:
            self._future.set_result(tensors)
            return
        with side:
            self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        assert not self._blocks, "waited for a Work that blocks the host, though its future orders streams"
        if self._end is not None:
            torch.accelerator.current_stream().wait_event(self._end)
        return True

    def get_future(self) -> Any:
        return self._future


class LateGroup(dist.ProcessGroup):
    """Takes tensors of ``device`` alone, as NCCL does; registers no backend, so nobody can ask which that is.

    Args:
        futures_order: waiting for a collective's future orders streams; else only waiting for its work does.
        blocks: nobody may wait for an all-reduce's work, which would block the host.
    """

    def __init__(self, device: str, futures_order: bool = True, blocks: bool = False):
        super().__init__(0, 2)
        self._device = torch.device(device)
        self._futures_order = futures_order
        self._blocks = blocks
        self._side = None if self._device.type == "cpu" else torch.Stream(self._device)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        doubles = options is None or options.reduceOp == dist.ReduceOp.SUM
        return self._run(tensors, lambda: [t.mul_(2) for t in tensors if doubles], self._blocks)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        return self._run(tensors, lambda: None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> LateWork:
        return self._run([*outputs[0], *inputs], lambda: [output.copy_(inputs[0]) for output in outputs[0]])

    def _run(self, tensors: list[Tensor], collective: Callable[[], Any], blocks: bool = False) -> LateWork:
        for tensor in tensors:
            if tensor.device.type != self._device.type:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if self._side is None:
            collective()
            return LateWork(tensors, None, self._futures_order)
        self._side.wait_stream(torch.accelerator.current_stream())
        with self._side, torch.no_grad():
            if self._device.type == "cuda":
                torch.cuda._sleep(CYCLES)
            for tensor in tensors:
                tensor.record_stream(self._side)
            collective()
        return LateWork(tensors, self._side, self._futures_order, blocks)
