"""Parameters that are reduced together, once, late: ``delay_all_reduce_named_params``.

Their gradients are windows on one flat buffer. When the gradient of ``param_to_hook_all_reduce``, the trigger, has
been accumulated, the buffer is averaged over ranks in one collective, and backward ends with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..messages import SHADOWED, wait_for
from ..parameters import all_names, every_name
from ..reducer import weakly
from ..start import broadcast_coalesced

Named = tuple[str, torch.nn.Parameter]


def checked(delayed: Iterable[Named] | None, trigger: torch.nn.Parameter | None) -> tuple[Named, ...]:
    """The pairs of ``delay_all_reduce_named_params``; none if it was not given.

    Raises:
        ValueError: one of the two arguments without the other.
        TypeError: something that is no pair of a name and a parameter.
    """
    if (delayed is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    if trigger is not None and not isinstance(trigger, torch.Tensor):
        raise TypeError(f"param_to_hook_all_reduce must be a parameter of the module, got {trigger!r}")
    named = tuple(delayed or ())
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise TypeError(f"delay_all_reduce_named_params must hold (name, parameter) pairs, got {pair!r}")
    return named


def names_of(module: torch.nn.Module, delayed: Sequence[Named]) -> set[str]:
    """All names of what is delayed: a tied parameter has several.

    Raises:
        ValueError: the module has no parameter of one of the names.
    """
    known = all_names(module) if delayed else set()
    for name, _ in delayed:
        if name not in known:
            raise ValueError(f"delay_all_reduce_named_params: the module has no parameter {name!r}")
    ids = {id(parameter) for _, parameter in delayed}
    return {name for name, parameter in every_name(module) if id(parameter) in ids} if ids else set()


def name_of(module: torch.nn.Module, trigger: torch.nn.Parameter) -> str | None:
    """The trigger's first name; None if it is no parameter of the module."""
    return next((name for name, parameter in every_name(module) if parameter is trigger), None)


class DelayedAllReduce:
    """The flat gradient buffer of the delayed parameters, and its one collective.

    Args:
        group: whom it is averaged with.
        named: the delayed parameters with their names.
        trigger: the one whose gradient starts the collective, with its name.
        broadcast_bytes: the parameters are broadcast, in messages of so many bytes; ``None``: they are not, and
            nothing here is collective before the first backward.

    Raises:
        ValueError: the delayed parameters have several dtypes or devices.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: tuple[str, torch.nn.Parameter],
        broadcast_bytes: int | None,
    ):
        self.named, self.trigger = list(named), trigger
        parameters = self._parameters = [p for _, p in named]
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            raise ValueError("delay_all_reduce_named_params must share one dtype and one device")
        total = sum(p.numel() for p in parameters)
        self._buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [
            piece.view(p.shape) for p, piece in zip(parameters, self._buffer.split([p.numel() for p in parameters]))
        ]
        self._streams: set[torch.Stream] = set()  # that have made the gradients of this backward
        self._sent_in = -1  # the backward of the last collective, as autograd numbers them
        self.set_group(group)
        if broadcast_bytes is not None:
            broadcast_coalesced(group, [p.detach() for p in parameters], broadcast_bytes, 0)
        self._place_hooks()

    def _place_hooks(self) -> None:
        note, reduce = weakly(self._note), weakly(self._reduce)
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))  # type: ignore[misc]
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad
        ]
        handles.append(self.trigger[1].register_post_accumulate_grad_hook(lambda _: reduce()))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def set_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.divisor, self.joining = group.size(), False
        self._accumulates = False  # a joined rank, whose buffer holds what all have averaged under no_sync

    def prepare(self, joining: bool, divisor: int | None) -> None:
        """Before backward: every delayed parameter without a gradient accumulates into the buffer.

        Args:
            joining: ranks may have run out of data.
            divisor: by how many ranks the sum is divided; ``None``: all of them.
        """
        self.joining, self.divisor, self._accumulates = joining, divisor or self.group.size(), False
        for parameter, view in zip(self._parameters, self._views):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    # --- in backward ---

    def _note(self, index: int) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self._sent_in and self.group.size() > 1:
            raise RuntimeError(
                f"The gradient of '{self.named[index][0]}', of delay_all_reduce_named_params, arrived after that of "
                f"'{self.trigger[0]}', and the all-reduce of the delayed gradients was on its way: pass a "
                "param_to_hook_all_reduce whose gradient comes later than theirs, of an earlier layer."
            )
        if self._buffer.device.type != "cpu":
            self._streams.add(torch.accelerator.current_stream(self._buffer.device))

    def _reduce(self) -> None:
        self._sent_in = torch._C._current_graph_task_id()
        for stream in self._streams:
            torch.accelerator.current_stream(self._buffer.device).wait_stream(stream)
        moved = [  # autograd or the program put another tensor there: back into the buffer
            (parameter, view, parameter.grad.clone() if _in(self._buffer, parameter.grad) else parameter.grad)
            for parameter, view in zip(self._parameters, self._views)
            if parameter.grad is not None and not _same_window(parameter.grad, view)
        ]
        for parameter, view, gradient in moved:
            parameter.grad = view.copy_(gradient)
        self._buffer.div_(self.divisor)
        queue = Variable._execution_engine.queue_callback
        if self.joining:  # a joined rank does not know when the trigger comes: after all buckets
            queue(lambda: queue(lambda: self._finish(self._send())))
        else:
            work = self._send()
            queue(lambda: self._finish(work))

    def _send(self) -> dist.Work:
        return dist.all_reduce(self._buffer, group=self.group, async_op=True)

    def _finish(self, work: dist.Work) -> None:
        wait_for(work, self.group, "the reduction of the delayed parameters")
        for stream in self._streams:  # the next to touch the buffer
            stream.wait_stream(torch.accelerator.current_stream(self._buffer.device))
        self._streams.clear()

    def shadow(self, synchronizes: bool, by_all: bool) -> None:
        """The collective of a rank that has no data left, after those of all buckets.

        Args:
            synchronizes: ``False`` under no_sync, where what was averaged so far is averaged again with the next.
            by_all: whether sums are divided by all ranks; else those with data share that among themselves.
        """
        if self._accumulates and by_all:
            self._buffer.div_(self.group.size())
        else:
            self._buffer.zero_()
        wait_for(self._send(), self.group, SHADOWED)
        self._accumulates = not synchronizes


def _in(buffer: torch.Tensor, gradient: torch.Tensor) -> bool:
    if gradient.layout != torch.strided:
        return False
    return gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _same_window(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride()
