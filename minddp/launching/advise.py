"""``minddp tune --advise``: what would make a step shorter, predicted, then tried.

Runs a few steps with the default arguments, asks :func:`minddp.report` what other buckets and fewer
bytes would bring, tries the two best of that beside the default, in turns, and says what to pass.
"""

from __future__ import annotations

import ast
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..module.distributed import DistributedDataParallel
from ..straggler.exchange import report

__all__ = ["Choice", "advice_table", "advise"]

_STEPS = 12
_GAIN = 0.02  # below which a measured gain is taken for noise

Loss = Callable[[torch.nn.Module], torch.Tensor]


@dataclass
class Choice:
    """Arguments of the constructor.

    Attributes:
        arguments: by name; none for the defaults.
        predicted_seconds: the step from forward's begin to the averages.
        measured_seconds: the same, of the slowest rank: the median.
    """

    arguments: dict[str, Any]
    predicted_seconds: float
    measured_seconds: float = 0.0

    @property
    def text(self) -> str:
        """As it is passed."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items()) or "the defaults"


def advise(
    module: torch.nn.Module,
    loss: Loss,
    *,
    rounds: int = 5,
    candidates: int = 2,
    settle: Callable[[DistributedDataParallel], object] | None = None,
    **arguments: Any,
) -> list[Choice]:
    """The default and the best predictions, each with what was measured. Collective.

    Args:
        module: stays as it is; each choice wraps a copy.
        loss: runs forward and returns a scalar.
        rounds: in each, every choice runs three steps, of which the first does not count.
        candidates: how many predictions are tried, the best ones.
        settle: what ``bucket_cap_mb="auto"`` needs before it is measured.
        arguments: of every wrapper (``device_ids``).

    Raises:
        ValueError: nothing could be predicted: no collective was seen, or on a device, where nobody knows its times.
    """
    default = DistributedDataParallel(copy.deepcopy(module), **arguments)
    for _ in range(_STEPS):
        _step(default, loss)
    choices = predict(default, _STEPS - 2)[: 1 + candidates]
    wrappers = [default]
    for choice in choices[1:]:
        wrappers.append(DistributedDataParallel(copy.deepcopy(module), **arguments, **choice.arguments))
        if settle is not None and choice.arguments.get("bucket_cap_mb") == "auto":
            settle(wrappers[-1])
    measure(choices, wrappers, loss, rounds)
    return choices


def predict(default: DistributedDataParallel, steps: int) -> list[Choice]:
    """The defaults, and then all that the report of ``default``'s last ``steps`` predicts, best first. Collective.

    Raises:
        ValueError: nothing could be predicted.
    """
    predicted = report(default, steps).advice
    if predicted is None:
        raise ValueError("nothing can be predicted: too few collectives, or on a device, whose times nobody knows")
    choices = [Choice({}, predicted.present.seconds)]
    for other in sorted(predicted.others, key=lambda other: other.seconds):
        name, _, value = other.name.partition("=")
        choices.append(Choice({name: ast.literal_eval(value)}, other.seconds))
    return choices


def measure(
    choices: Sequence[Choice], wrappers: Sequence[DistributedDataParallel], loss: Loss, rounds: int
) -> None:
    """Sets what each of ``choices`` takes, by its wrapper, in turns, forth and back. Collective."""
    times: list[list[float]] = [[] for _ in choices]
    for turn in range(rounds + 1):
        for seconds, ddp in list(zip(times, wrappers))[:: -1 if turn % 2 else 1]:
            measured = [_step(ddp, loss) for _ in range(3)][1:]
            seconds += measured if turn else []
    slowest = torch.tensor(times, dtype=torch.float64, device=wrappers[0].device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=wrappers[0].process_group)
    for choice, seconds in zip(choices, slowest.tolist()):
        choice.measured_seconds = statistics.median(seconds)


def _step(ddp: DistributedDataParallel, loss: Loss) -> float:
    """Its seconds, from when all ranks are there."""
    ddp.zero_grad(set_to_none=True)
    dist.barrier(ddp.process_group)
    begin = time.perf_counter()
    loss(ddp).backward()
    return time.perf_counter() - begin


def advice_table(choices: Sequence[Choice]) -> str:
    """The choices, a line each, and what to pass."""
    lines = [f"{'arguments':<24}{'predicted ms':>14}{'measured ms':>13}"]
    for choice in choices:
        predicted, measured = 1e3 * choice.predicted_seconds, 1e3 * choice.measured_seconds
        lines.append(f"{choice.text:<24}{predicted:>14.1f}{measured:>13.1f}")
    best, default = min(choices, key=lambda choice: choice.measured_seconds), choices[0]
    gain = 1 - best.measured_seconds / default.measured_seconds
    if gain < _GAIN:
        return "\n".join([*lines, "Keep the defaults: nothing that was tried is faster by more than noise."])
    also = " Gradients are rounded: docs/arguments.md." if "wire" in best.arguments else ""
    return "\n".join([*lines, f"DistributedDataParallel(module, {best.text}): {gain:.0%} less time a step.{also}"])
