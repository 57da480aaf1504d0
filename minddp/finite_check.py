"""Which rank's gradient was not finite first.

One NaN on one rank makes the average NaN on all of them, and then nothing tells where it came from. So each rank
looks at its own gradients in the packed bucket, just before they are added to the others', and one small maximum over
ranks, sent beside the last bucket, tells everyone whether anybody has found something. Only then are names exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .init_sync import gather_objects, indented, ranks_text


class FiniteCheck:
    """The check of one reducer's gradients.

    Args:
        group: the reducer's process group.
        names: parameter names by ``id`` of the parameter.
    """

    def __init__(self, group: dist.ProcessGroup, names: dict[int, str]):
        self._group = group
        self._names = names
        self._found: list[tuple[list[str], torch.Tensor]] = []
        self._any: torch.Tensor | None = None
        self._work: Any = None

    def before(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, preceded by a look at the bucket that it gets."""

        def looking(state: object, bucket: Any) -> Any:
            self._look(bucket)
            return hook(state, bucket)

        return looking

    @torch.no_grad()
    def _look(self, bucket: Any) -> None:
        if bucket.index() == 0:
            self._found = []
        gradients = [g.coalesce().values() if g.is_sparse else g for g in bucket.gradients()]
        named = [
            (self._names[id(parameter)], gradient)
            for parameter, gradient in zip(bucket.parameters(), gradients)
            if gradient.numel()
        ]
        if named:
            largest = torch._foreach_norm([gradient for _, gradient in named], ord=float("inf"))
            self._found.append(([name for name, _ in named], ~torch.stack(largest).isfinite()))
        if bucket.is_last():
            device = bucket.buffer().device
            flags = [flags.any().to(device) for _, flags in self._found]
            self._any = (torch.stack(flags).any() if flags else torch.zeros((), device=device)).to(torch.int32)
            self._work = dist.all_reduce(self._any, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def check(self) -> None:
        """Waits for the ranks' answer about the last synchronized backward; asked again, it is silent.

        Raises:
            RuntimeError: on every rank, where any rank's own gradient was not finite. Names parameters and ranks.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        assert self._any is not None
        if not self._any.item():
            return
        mine = [name for names, flags in self._found for name, bad in zip(names, flags.tolist()) if bad]
        raise RuntimeError(_message(gather_objects(mine, self._group)))


def _message(everyone: Sequence[Sequence[str]]) -> str:
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    lines = [
        f"'{name}' on " + ranks_text([rank for rank, theirs in enumerate(everyone) if name in theirs])
        for name in names
    ]
    return (
        f"DistributedDataParallel(check_finite=True): before they were averaged, the gradients of {len(names)} "
        "parameters held NaN or infinity:\n"
        + indented(lines)
        + "\nNo optimizer has used them. Look at these ranks' batches and losses; "
        "torch.autograd.set_detect_anomaly(True) finds the operation. Under a GradScaler, which expects infinities "
        "and skips their steps, leave check_finite out."
    )
