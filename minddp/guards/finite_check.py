"""Which rank's gradient was not finite first.

One NaN on one rank makes the average NaN on all of them, and then nothing tells where it came from. So each rank
looks at its own gradients in the packed bucket, just before they are added to the others', and one small maximum over
ranks, sent beside the last bucket, tells everyone whether anybody has found something. Only then are names exchanged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import messages
from ..functions import wrapper_of
from ..messages import gather_objects, indented, ranks_text


class FiniteCheck:
    """The check of one reducer's gradients.

    Args:
        group: the reducer's process group.
        names: parameter names by ``id`` of the parameter.
        device: where the group's collectives work.
        mode: what follows where somebody has found something: ``"raise"``, ``"warn"``, or ``"skip"`` the step.
        on_skip: called where a step is to be skipped.
        hint: what else may be the cause, for messages.

    Attributes:
        skipped: iterations whose steps were to be skipped so far, the same on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: dict[int, str],
        device: torch.device,
        mode: str = "raise",
        on_skip: Callable[[], None] = lambda: None,
        hint: str = "",
    ):
        self.mode = mode
        self._on_skip, self._hint = on_skip, hint
        self.skipped = 0
        self._skips = False
        self._group = group
        self._names = names
        self._device = device
        self._found: list[tuple[list[str], torch.Tensor]] = []
        self._any: torch.Tensor | None = None
        self._work: Any = None

    @torch.no_grad()
    def look(self, bucket: Any) -> None:
        """Before ``bucket`` is reduced."""
        named = [
            (self._names[id(parameter)], _numbers(gradient))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients())
        ]
        named = [(name, gradient) for name, gradient in named if gradient.numel()]
        if named:
            largest = torch._foreach_norm([gradient for _, gradient in named], ord=float("inf"))
            self._found.append(([name for name, _ in named], ~(torch.stack(largest) < math.inf)))

    @torch.no_grad()
    def send(self) -> None:
        """Asks all ranks whether anybody has found something. Collective, once an iteration, after its buckets."""
        self._skips = False
        flags = [flags.any().to(self._device) for _, flags in self._found]
        found = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=self._device)
        self._any = found.to(torch.int32)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stub forgets that it converts
        self._work = self._group.allreduce([self._any], options)

    def forget(self) -> None:
        """The iteration was given up."""
        self._found, self._work, self._skips = [], None, False

    def check(self, is_used: bool = False) -> bool:
        """Waits for the ranks' answer about the last synchronized backward; asked again, it is silent.

        Args:
            is_used: an optimizer has used the gradients, which its closure made.

        Returns:
            Whether steps with these gradients are to be skipped: all of them until the next synchronized backward.

        Raises:
            RuntimeError: with ``mode="raise"``, on every rank, where any rank's own gradient was not finite. Names
                parameters and ranks. With ``mode="skip"``, where it is too late.
        """
        if self._work is None:
            return self._skips
        messages.wait_for(self._work, self._group, "the ranks' answer whether gradients were finite")
        self._work = None
        found, self._found = self._found, []
        assert self._any is not None
        if not self._any.item():
            return False
        if self.mode == "skip" and not is_used:
            self.skipped += 1
            self._skips = True
            self._on_skip()
            return True
        mine = [name for names, flags in found for name, bad in zip(names, flags.tolist()) if bad]
        message = _message(self.mode, gather_objects(mine, self._group), self._hint, is_used)
        if self.mode != "warn":
            raise RuntimeError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _message(mode: str, everyone: Sequence[Sequence[str]], hint: str, is_used: bool) -> str:
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    lines = [
        f"'{name}' on " + ranks_text([rank for rank, theirs in enumerate(everyone) if name in theirs])
        for name in names
    ]
    return (
        f"DistributedDataParallel(check_finite={mode!r}): before they were averaged, the gradients of {len(names)} "
        "parameters held NaN or infinity:\n"
        + indented(lines)
        + ("\nNo optimizer has used them." if mode == "raise" and not is_used else "\nThe optimizer uses them.")
        + hint
        + " Look at these ranks' batches and losses; torch.autograd.set_detect_anomaly(True) finds the operation. "
        'Under a GradScaler, which expects infinities and skips their steps, use check_finite="skip" or none.'
    )


def skipped_steps(ddp: torch.nn.Module) -> int:
    """With ``check_finite="skip"``: iterations whose gradients no optimizer used; the same on all ranks."""
    guards = wrapper_of(ddp, "skipped_steps")._minddp_observers.get("guards")
    return 0 if guards is None or guards.finite is None else int(guards.finite.skipped)
