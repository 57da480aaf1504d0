"""Parameters that are reduced together, once, late: ``delay_all_reduce_named_params``.

Their gradients are windows on one flat buffer. When the gradient of ``param_to_hook_all_reduce`` has been
accumulated, the buffer is averaged over ranks in one collective, and backward ends with it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..ranks.broadcast import broadcast_coalesced


class DelayedAllReduce:
    """The flat gradient buffer of the delayed parameters, and its one collective."""

    def __init__(self, group: dist.ProcessGroup, parameters: list[torch.nn.Parameter], trigger: torch.nn.Parameter):
        self.group = group
        self._parameters = parameters
        total = sum(p.numel() for p in parameters)
        self._buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [
            piece.view(p.shape) for p, piece in zip(parameters, self._buffer.split([p.numel() for p in parameters]))
        ]
        self._streams: set[torch.Stream] = set()  # that have made the gradients of this backward
        if self._buffer.device.type != "cpu":
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda _: self._note_stream())
        trigger.register_post_accumulate_grad_hook(lambda _: self._reduce())

    @classmethod
    def make(
        cls,
        group: dist.ProcessGroup,
        parameters: list[torch.nn.Parameter],
        trigger: torch.nn.Parameter | None,
        broadcast_bytes: int,
    ) -> DelayedAllReduce | None:
        """``None`` where nothing is delayed; else broadcasts the parameters and installs the hook.

        Raises:
            ValueError: the delayed parameters have several dtypes or devices.
        """
        if not parameters:
            return None
        assert trigger is not None
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            raise ValueError("delay_all_reduce_named_params must share one dtype and one device")
        broadcast_coalesced(group, [p.detach() for p in parameters], broadcast_bytes, 0)
        return cls(group, parameters, trigger)

    def prepare(self) -> None:
        """Before backward: every delayed parameter without a gradient accumulates into the buffer."""
        for parameter, view in zip(self._parameters, self._views):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def _note_stream(self) -> None:
        self._streams.add(torch.accelerator.current_stream(self._buffer.device))

    def _reduce(self) -> None:
        for stream in self._streams:
            torch.accelerator.current_stream(self._buffer.device).wait_stream(stream)
        for parameter, view in zip(self._parameters, self._views):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)  # autograd put a new tensor there; back into the buffer
                parameter.grad = view
        self._buffer.div_(self.group.size())
        work = dist.all_reduce(self._buffer, group=self.group, async_op=True)
        Variable._execution_engine.queue_callback(lambda: self._finish(work))

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        for stream in self._streams:  # the next to touch the buffer
            stream.wait_stream(torch.accelerator.current_stream(self._buffer.device))
        self._streams.clear()
