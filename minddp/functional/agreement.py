"""Before a collective starts, its ranks agree on what it is; if they cannot, all of them raise.

A backend that is given different shapes, dtypes or calls on different ranks hangs, aborts the process, or adds bytes
that have nothing to do with each other. So before each forward call the ranks compare a digest of what they are about
to run (``control.py``). Only where it differs do they gather the calls themselves, as JSON, and every rank evaluates
the same function of the same calls: all go on, or all raise the same :class:`CollectiveError`. A rank whose arguments
are bad says so before it raises. The calls also carry what has to be learned: the rows of an uneven all_gather, what
a broadcast's receivers will get. Whether any rank needs gradients, and all of them join in backward, comes with the
digest.

``MINDDP_CHECK_COLLECTIVES=0`` (on all ranks alike) leaves it out wherever nothing has to be learned: then equal
calls, shapes, dtypes and ``requires_grad`` on all ranks are yours to keep. After an error nothing of the failed call
is under way; the group can be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import environment
from .control import CollectiveError, compare, everyone

__all__ = ["Call", "CollectiveError", "agree", "require_replicated"]

_MOST_TEXT = 1024

# Gradient modes of a rank.
NO_GRAD, NOT_REQUIRED, REQUIRED = 0, 1, 2
# A tensor's first dimension is the same on all ranks; or each rank's is told by its call; or it differs, and the
# ranks know or exchange what they need of it (`EXPECTED`: and compare that with what they were given).
SAME, TOLD, APART, EXPECTED = "same", "told", "apart", "expected"


@dataclass(frozen=True)
class Call:
    """One rank's view of the collective that it is about to run. Travels as JSON."""

    collective: str
    op: str = ""
    loss: str = ""
    root: int = -1
    dtype: str = ""
    device: str = ""
    shape: tuple[int, ...] | None = None
    grad: int = NOT_REQUIRED
    rows: tuple[int, ...] = ()  # rows per rank, where all ranks must split alike
    first: str = SAME
    error: str = ""

    @classmethod
    def of(cls, told: Any) -> Call:
        """What another rank has told."""
        shape = None if told["shape"] is None else tuple(told["shape"])
        return cls(**{**told, "shape": shape, "rows": tuple(told["rows"])})

    def common(self) -> str:
        """What is the same on all ranks, where nothing has to be learned from each other's calls."""
        apart = self.shape and self.first in (APART, EXPECTED)
        return repr(replace(self, grad=0, shape=self.shape[1:] if self.shape and apart else self.shape))

    def text(self) -> str:
        if self.error:
            return self.error
        options = [f"{name}={value!r}" for name, value in (("op", self.op), ("loss", self.loss)) if value]
        if self.root >= 0:
            options.append(f"root={self.root}")
        if self.rows:
            options.append(f"splits={list(self.rows)}")
        what = "no tensor" if self.shape is None else f"{self.dtype} of shape {self.shape}"
        mode = " under no_grad" if self.grad == NO_GRAD else ""
        return f"{self.collective}({', '.join(options)}) of {what}{mode}"

    def empty(self) -> Tensor:
        """A tensor to receive what this rank announced; on the reader's current device of that type."""
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return torch.empty(self.shape or (), dtype=dtype, device=self.device)


def agree(call: Call, group: Any) -> tuple[bool, list[Call]]:
    """Whether any rank needs gradients, and every rank's call, in rank order.

    Raises:
        CollectiveError: on every rank, when a rank's arguments are bad or the calls do not fit together.
    """
    same, (needs_grad, no_grad) = compare(call.common(), [call.grad == REQUIRED, call.grad == NO_GRAD], group)
    if same and not call.error and not (needs_grad and no_grad):
        return needs_grad, [call] * dist.get_world_size(group)
    calls = _everyones(call, group)
    if problem := disagreement(calls):
        raise CollectiveError(message(problem, [each.text() for each in calls]))
    return needs_grad, calls


def _everyones(call: Call, group: Any) -> list[Call]:
    try:
        return [Call.of(told) for told in everyone(asdict(replace(call, error=call.error[:_MOST_TEXT])), group)]
    except (KeyError, TypeError, ValueError):
        raise CollectiveError(
            "minddp.functional: another library's collective on the same group came between."
        ) from None


_MUST_MATCH: list[tuple[str, Callable[[Call], Any]]] = [
    ("which collective comes now", lambda c: c.collective),
    ("the op", lambda c: c.op),
    ("the kind of loss", lambda c: c.loss),
    ("the root rank", lambda c: c.root),
]

_TENSORS_MUST_MATCH: list[tuple[str, Callable[[Call], Any]]] = [
    ("the dtype", lambda c: c.dtype),
    ("the number of dimensions", lambda c: len(c.shape or ())),
    ("the shape", lambda c: c.shape if c.first == SAME else (c.shape or ())[1:]),
    ("the splits", lambda c: c.rows),
]


def disagreement(calls: Sequence[Call]) -> str:
    """What the ranks do not agree on, or an empty text; the same on every rank."""
    if any(call.error for call in calls):
        return "arguments"
    tensors = [call for call in calls if call.shape is not None]
    for checks, among in ((_MUST_MATCH, calls), (_TENSORS_MUST_MATCH, tensors)):
        for name, value in checks:
            if len({value(call) for call in among}) > 1:
                return name
    modes = {call.grad for call in calls}
    return "whether gradients are recorded" if {NO_GRAD, REQUIRED} <= modes else ""


def message(problem: str, texts: Sequence[str]) -> str:
    """The error's text: what is wrong, and what every rank asked for."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    lines = [f"  {_ranks(ranks, len(texts))}: {text}" for text, ranks in by_text.items()]
    if problem == "arguments":
        head = "minddp.functional: a rank's arguments are not usable, so no rank runs the collective."
    else:
        head = f"minddp.functional: the ranks do not agree on {problem}."
    return "\n".join([head + " Ranks are those of the group.", *lines])


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def require_replicated(grad: Tensor, group: Any) -> None:
    """Raises on every rank unless the gradients of what ``loss="replicated"`` calls one value are the same.

    Compared are a norm and a sum, in float64: their digest first, and where that differs the numbers, of which
    rounding is forgiven. On CUDA a wait for the stream; left out with ``MINDDP_CHECK_COLLECTIVES=0``.
    """
    if not environment.check_collectives():
        return
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    stats = torch.stack([norm, numbers.sum(dtype=torch.float64)]).tolist()
    if compare(repr(stats), [], group)[0]:
        return
    rows = torch.tensor(everyone(stats, group), dtype=torch.float64)
    if not _equal_up_to_rounding(rows, grad):
        listed = "; ".join(f"rank {rank}: norm {n:.6g}, sum {s:.6g}" for rank, (n, s) in enumerate(rows.tolist()))
        raise CollectiveError(
            'minddp.functional: loss="replicated" says that all ranks compute the same loss from a '
            "collective's result, but the gradients that come back to it differ. If every rank has a "
            f'loss of its own, use loss="per_rank". Gradients of shape {tuple(grad.shape)}: {listed}'
        )


def _equal_up_to_rounding(rows: Tensor, grad: Tensor) -> bool:
    """``rows`` holds (norm, sum) per rank. The sum's error is bounded by sqrt(numel) times the norm's."""
    tolerance = 64 * torch.finfo(grad.dtype).eps
    norms, sums = rows[:, 0], rows[:, 1]
    bound = tolerance * float(norms.nan_to_num().max())
    close_norms = torch.isclose(norms, norms[:1], rtol=0, atol=bound, equal_nan=True)
    sum_bound = bound * max(grad.numel(), 1) ** 0.5
    close_sums = torch.isclose(sums, sums[:1], rtol=0, atol=sum_bound, equal_nan=True)
    return bool(close_norms.all() and close_sums.all())
