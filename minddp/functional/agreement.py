"""Before a collective starts, its ranks agree on what it is; if they cannot, all of them raise.

Overview
    A backend that is given different shapes, dtypes or calls on different ranks hangs, aborts the
    process, or adds bytes that have nothing to do with each other. So each forward call is preceded by
    an exchange of one fixed-size header per rank (216 bytes). Every rank then evaluates the same
    function of the same headers: all go on, or all raise the same :class:`CollectiveError`. A rank whose
    arguments are bad sends a header that says so before it raises. The headers also carry what a call
    has to learn anyway: the sizes of an uneven all_gather, what a broadcast's receivers will get, and
    whether any rank needs gradients (then all of them join in backward).

Cost
    One small collective per forward call: one latency of the network. It runs on the CPU (``control.py``), so
    that no CUDA stream is waited for. ``MINDDP_CHECK_COLLECTIVES=0`` (on all ranks alike) leaves it out
    wherever nothing has to be learned: then equal calls, shapes, dtypes and ``requires_grad`` on all ranks
    are yours to keep.

What always holds
    After an error nothing of the failed call is under way; the group can be used again.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .. import environment
from .control import all_gather_ints

__all__ = ["Call", "CollectiveError", "agree", "require_replicated"]

_MAGIC = 0x6D696E64647031
MAX_DIMS = 15
_TEXT_BYTES = 1024

# Gradient modes of a rank.
NO_GRAD, NOT_REQUIRED, REQUIRED = 0, 1, 2


class CollectiveError(RuntimeError):
    """The ranks of a group cannot run a collective together; raised on all of them with the same text."""


@dataclass(frozen=True)
class Call:
    """One rank's view of the collective that it is about to run."""

    collective: str
    op: str = ""
    loss: str = ""
    root: int = -1
    dtype: torch.dtype | None = None
    device: str = ""
    shape: tuple[int, ...] | None = None
    grad: int = NOT_REQUIRED
    rows: tuple[int, ...] = ()  # rows per rank, where all ranks must split alike
    same_shape: bool = True  # else only the dimensions after the first are compared
    error: str = ""

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

    def encode(self) -> list[int]:
        shape = self.shape or ()
        failed = bool(self.error)
        return [
            _MAGIC,
            int(failed),
            _code(self.collective),
            _code(self.op),
            _code(self.loss),
            self.root,
            0 if self.dtype is None else _code(str(self.dtype)),
            _code(self.device),
            self.grad,
            _code(str(self.rows)),
            int(self.same_shape),
            -1 if self.shape is None or failed else len(shape),
            *(() if failed else shape),
            *([0] * (MAX_DIMS - (0 if failed else len(shape)))),
        ]


@dataclass(frozen=True)
class Header:
    """What a rank learns of another one's call. Names travel as checksums."""

    magic: int
    failed: int
    collective: int
    op: int
    loss: int
    root: int
    dtype: int
    device: int
    grad: int
    rows: int
    same_shape: int
    shape: tuple[int, ...] | None

    @staticmethod
    def decode(values: Sequence[int]) -> Header:
        dims, sizes = values[_FIXED_INTS], values[_FIXED_INTS + 1 :]
        fixed = dict(zip(_HEADER_FIELDS, values[:_FIXED_INTS], strict=True))
        return Header(**fixed, shape=None if dims < 0 else tuple(sizes[:dims]))


_HEADER_FIELDS = [field.name for field in fields(Header) if field.name != "shape"]
_FIXED_INTS = len(_HEADER_FIELDS)  # then come the number of dimensions and the sizes


def _code(name: str) -> int:
    return zlib.crc32(name.encode())


_DTYPES = {_code(str(v)): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


_DEVICES = {_code(name): name for name in (
    "cpu", "cuda", "xpu", "hpu", "mps", "mtia", "xla", torch._C._get_privateuse1_backend_name(),
)}  # fmt: skip


def require_announceable(x: Tensor) -> None:
    """Raises where :func:`empty_like_header` could make no such tensor on the other ranks."""
    if _code(x.device.type) not in _DEVICES or _code(str(x.dtype)) not in _DTYPES or x.is_quantized:
        raise TypeError(f"x, {x.dtype} on {x.device}, is of no kind that the other ranks can make a tensor of")


def empty_like_header(header: Header) -> Tensor:
    """A tensor to receive what another rank announced; on this rank's current device of that type."""
    return torch.empty(header.shape or (), dtype=_DTYPES[header.dtype], device=_DEVICES[header.device])


def agree(call: Call, group: Any) -> list[Header]:
    """Every rank's header, in rank order.

    Raises:
        CollectiveError: on every rank, when a rank's arguments are bad or the calls do not fit together.
    """
    headers = [Header.decode(row) for row in all_gather_ints(call.encode(), group)]
    problem = disagreement(headers)
    if problem:
        _raise_together(problem, call, group)
    return headers


_MUST_MATCH: list[tuple[str, Callable[[Header], Any]]] = [
    ("which collective comes now", lambda h: h.collective),
    ("the op", lambda h: h.op),
    ("the kind of loss", lambda h: h.loss),
    ("the root rank", lambda h: h.root),
]

_TENSORS_MUST_MATCH: list[tuple[str, Callable[[Header], Any]]] = [
    ("the dtype", lambda h: h.dtype),
    ("the number of dimensions", lambda h: len(h.shape or ())),
    ("the shape", lambda h: h.shape if h.same_shape else (h.shape or ())[1:]),
    ("the splits", lambda h: h.rows),
]


def disagreement(headers: Sequence[Header]) -> str:
    """What the ranks do not agree on, or an empty text; the same on every rank."""
    if any(h.magic != _MAGIC for h in headers):
        return "another library's collective on the same group came between"
    if any(h.failed for h in headers):
        return "arguments"
    tensors = [h for h in headers if h.shape is not None]
    for name, value in _MUST_MATCH:
        if len({value(h) for h in headers}) > 1:
            return name
    for name, value in _TENSORS_MUST_MATCH:
        if len({value(h) for h in tensors}) > 1:
            return name
    modes = {h.grad for h in headers}
    return "whether gradients are recorded" if {NO_GRAD, REQUIRED} <= modes else ""


def _raise_together(problem: str, call: Call, group: Any) -> None:
    """Collects what every rank was about to do and raises with it, on every rank."""
    text = call.text().encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    rows = all_gather_ints(array("q", text).tolist(), group)
    texts = [array("q", row).tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]
    raise CollectiveError(message(problem, texts))


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

    Compared are a norm and a sum, in float64; rounding is forgiven. One small all_gather, and on CUDA a
    wait for the stream; left out with ``MINDDP_CHECK_COLLECTIVES=0``.
    """
    if not environment.check_collectives():
        return
    numbers = torch.view_as_real(grad) if grad.is_complex() else grad
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    stats = torch.stack([norm, numbers.sum(dtype=torch.float64)]).cpu()
    rows = torch.tensor(all_gather_ints(stats.view(torch.int64).tolist(), group)).view(torch.float64)
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
