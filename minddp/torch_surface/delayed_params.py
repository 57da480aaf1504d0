"""Parameters that are reduced together, once, late: ``delay_all_reduce_named_params``.

Their gradients are windows on one flat buffer. When the gradient of ``param_to_hook_all_reduce``, the trigger, has
been accumulated, the buffer is averaged over ranks in one collective, and backward ends with it.

A gradient that no such collective has averaged (the trigger took no part in its backward) is looked at before an
optimizer uses it: as those made past a wrapper are, see ``guards/local_gradients.py``.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..guards import step
from ..guards.local_gradients import LocalGradients
from ..messages import SHADOWED, wait_for
from ..reducer import weakly
from ..start import broadcast_coalesced


class DelayedAllReduce(step.Guarded):
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
        self._iteration = 0  # collectives so far
        self._sent_in = -1  # the backward of the last one, as autograd numbers them
        self._local: dict[int, int] = {}  # index of what has grown since that, and the backward that did it
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
        """From now on. What is local is compared once all ranks have had a collective there."""
        self.group = group
        self.divisor, self.joining = group.size(), False
        self._accumulates = False  # a joined rank, whose buffer holds what all have averaged under no_sync
        self._is_named = False
        self._local_gradients = LocalGradients(group, None, "")

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
        self._local[index] = backward
        if self._buffer.device.type != "cpu":
            self._streams.add(torch.accelerator.current_stream(self._buffer.device))

    def _reduce(self) -> None:
        self._sent_in = torch._C._current_graph_task_id()
        self._local.clear()
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
        self._iteration += 1
        return dist.all_reduce(self._buffer, group=self.group, async_op=True)

    def _finish(self, work: dist.Work) -> None:
        wait_for(work, self.group, "the reduction of the delayed parameters")
        for stream in self._streams:  # the next to touch the buffer
            stream.wait_stream(torch.accelerator.current_stream(self._buffer.device))
        self._streams.clear()
        if not self._is_named and not self.joining:
            self._agree_on_name()

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

    # --- before an optimizer's step ---

    def name(self, token: str) -> None:
        """What all ranks call this wrapper. Counting is no name: a copy on one rank alone would shift the rest."""
        self._is_named = True
        if _has_store(self.group):
            store = dist.distributed_c10d._get_default_store()
            self._local_gradients = LocalGradients(self.group, store, f"delayed/{token}")

    def _agree_on_name(self) -> None:
        """Collective. A copy was made without one."""
        token = torch.tensor([secrets.randbits(62)], device=self._buffer.device)
        if _has_store(self.group):
            broadcast_coalesced(self.group, [token], 8, 0)
        self.name(f"{int(token):x}")

    def may_refuse_step(self) -> bool:
        return bool(self._local)

    def parameter_ids(self) -> set[int]:
        return {id(parameter) for parameter in self._parameters}

    def yield_ownership(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        ids = set(map(id, parameters))
        self._local = {i: b for i, b in self._local.items() if id(self._parameters[i]) not in ids}

    def has_averaged(self, parameter: torch.nn.Parameter, backward: int) -> bool:
        indices = [i for i, mine in enumerate(self._parameters) if mine is parameter]
        return any(i not in self._local and self._sent_in >= backward for i in indices)

    def check_step(self, stepped: set[int], others: Sequence[step.Guarded]) -> bool:
        """Raises if the gradients differ between ranks."""
        found = {
            i: backward
            for i, backward in self._local.items()
            if not any(other.has_averaged(self._parameters[i], backward) for other in others)
        }
        if stepped.isdisjoint(id(self._parameters[i]) for i in found):
            return False
        gradients = [(self.named[i][0], self._parameters[i].grad) for i in found]
        named = [(name, gradient) for name, gradient in gradients if gradient is not None]
        try:
            self._local_gradients.check(named, max(found.values()), self._iteration)
        except RuntimeError as error:
            raise RuntimeError(
                f"optimizer.step() on rank {self.group.rank()} would use gradients of delay_all_reduce_named_params "
                f"that were never averaged, of {[name for name, _ in named][:10]}: '{self.trigger[0]}', whose "
                "gradient starts their all-reduce, took no part in that backward, and the ranks' differ. Pass a "
                "param_to_hook_all_reduce that every backward uses; call the wrapper, ddp(...), instead of "
                "ddp.module(...); or zero these gradients before step()."
            ) from error
        return False


def _has_store(group: dist.ProcessGroup) -> bool:
    return group.size() > 1 and type(group) is dist.ProcessGroup  # those written in Python have none


def _in(buffer: torch.Tensor, gradient: torch.Tensor) -> bool:
    if gradient.layout != torch.strided:
        return False
    return gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _same_window(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride()
