"""Whose gradients of a collective are right? Torch's two APIs and ours, beside numerical differentiation.

    python benchmarks/collective_gradients.py                 two ranks
    python benchmarks/collective_gradients.py --ranks 3 --second
    python benchmarks/collective_gradients.py --only all_reduce --json out.json

On every rank x = 1 and xx = (rank + 2) * x * (1, 1, ..); the rank's loss is (rank + 1) times its result,
elements weighted 1, 2, .., or the squares of them with ``--second``, where the derivative of the ranks'
x.grad, weighted by rank + 1, is asked for. A cell shows the ranks' gradients of x; truth moves each x
and watches the sum of all losses.

Torch's APIs are ``torch.distributed.nn.functional`` and the functional collectives
(``torch.distributed._functional_collectives``, their ``_autograd`` variants where there are). "none": the
API does not have the collective or the op. A cell is printed as it came: a wrong number, an error, a hang
(ended after ``--timeout`` seconds) or an abort.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as torch_nn
from torch import Tensor

from minddp import functional as ours
from tests.functional import gradcheck
from tests.ranks_pool import RankError, run_ranks

Program = Callable[[Tensor], Any]
APIS = ("torch.distributed.nn", "functional collectives", "minddp.functional")


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _rows(rank: int, uneven: bool) -> int:
    return rank + 1 if uneven else 1


def _all_reduce(op: str, rank: int, size: int) -> tuple[Program | None, ...]:
    return (
        lambda x: torch_nn.all_reduce(x, _op(op)),
        lambda x: funcol.all_reduce(x, op, dist.group.WORLD),
        lambda x: ours.all_reduce(x, op),
    )


def _all_reduce_tied(op: str, rank: int, size: int) -> tuple[Program | None, ...]:
    """xx / (rank + 2), 1 on the first and the last rank; less on those between."""
    less = float(0 < rank < size - 1)
    return tuple((lambda x, p=p: p(x / (rank + 2) - less)) for p in _all_reduce(op, rank, size))  # type: ignore[misc]


def _all_reduce_zero(op: str, rank: int, size: int) -> tuple[Program | None, ...]:
    """xx - 2: 0 on rank 0 alone."""
    return tuple((lambda x, p=p: p(x - 2)) for p in _all_reduce(op, rank, size))  # type: ignore[misc]


def _reduce_scatter(op: str, rank: int, size: int) -> tuple[Program | None, ...]:
    def nn(x: Tensor) -> Tensor:
        return torch_nn.reduce_scatter(torch.empty_like(x), list((x * _ramp(size)).split(1)), _op(op))

    return (
        nn,
        lambda x: funcol.reduce_scatter_tensor_autograd(x * _ramp(size), op, 0, dist.group.WORLD),
        lambda x: ours.reduce_scatter(x * _ramp(size), op),
    )


def _ramp(size: int) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64)


def _all_gather(kind: str, rank: int, size: int) -> tuple[Program | None, ...]:
    def local(x: Tensor) -> Tensor:
        return x.expand(_rows(rank, kind == "uneven")).contiguous()

    return (
        lambda x: torch.cat(torch_nn.all_gather(local(x))),
        lambda x: funcol.all_gather_tensor_autograd(local(x), 0, dist.group.WORLD),
        lambda x: ours.all_gather(local(x)),
    )


def _all_to_all(kind: str, rank: int, size: int) -> tuple[Program | None, ...]:
    send = [1] * size if kind == "even" else [rank + other for other in range(size)]

    def nn(x: Tensor) -> Tensor:
        rows = x.expand(sum(send)).contiguous()
        return torch_nn.all_to_all_single(rows.new_empty(sum(send)), rows, send, send)

    return (
        nn,
        lambda x: funcol.all_to_all_single_autograd(x.expand(sum(send)), send, send, dist.group.WORLD),
        lambda x: ours.all_to_all(x.expand(sum(send)), send),
    )


def _broadcast(kind: str, rank: int, size: int) -> tuple[Program | None, ...]:
    if kind == "subgroup":
        group, root = dist.new_group([size - 2, size - 1]), size - 1
        if rank < size - 2:
            return (lambda x: x,) * 3  # outside the group
        return (
            lambda x: torch_nn.broadcast(x * 1, root, group),
            None,
            lambda x: ours.broadcast(x, 1, group),
        )
    return (
        lambda x: torch_nn.broadcast(x * 1, 1),
        lambda x: funcol.broadcast(x, 1, dist.group.WORLD),
        lambda x: ours.broadcast(x, 1),
    )


def _reduce(op: str, rank: int, size: int) -> tuple[Program | None, ...]:
    def at_root(y: Tensor) -> Tensor:
        return y if rank == 1 else y * 0  # elsewhere c10d leaves whatever its algorithm left

    return lambda x: at_root(torch_nn.reduce(x, 1, _op(op))), None, lambda x: at_root(ours.reduce(x, 1, op))


def _gather(kind: str, rank: int, size: int) -> tuple[Program | None, ...]:
    def at_root(y: Tensor) -> Tensor:
        return y if rank == 1 else y.sum() * 0

    def local(x: Tensor) -> Tensor:
        return x.expand(_rows(rank, kind == "uneven")).contiguous()

    return (
        lambda x: at_root(torch.cat(torch_nn.gather(local(x), 1))),
        None,
        lambda x: at_root(ours.gather(local(x), 1)),
    )


def _scatter(kind: str, rank: int, size: int) -> tuple[Program | None, ...]:
    return (
        lambda x: torch_nn.scatter(list((x * _ramp(size)).split(1)), 1),
        None,
        lambda x: ours.scatter(x * _ramp(size), 1),
    )


CASES: list[tuple[str, str, Callable[[str, int, int], tuple[Program | None, ...]], str]] = [
    *[("all_reduce", op, _all_reduce, op) for op in ("sum", "avg", "product", "min", "max")],
    ("all_reduce", "max, two tie", _all_reduce_tied, "max"),
    ("all_reduce", "product, a zero", _all_reduce_zero, "product"),
    *[("reduce_scatter", op, _reduce_scatter, op) for op in ("sum", "avg", "min", "max")],
    *[("reduce", op, _reduce, op) for op in ("sum", "avg", "product", "max")],
    *[("all_gather", kind, _all_gather, kind) for kind in ("even", "uneven")],
    *[("gather", kind, _gather, kind) for kind in ("even", "uneven")],
    ("scatter", "even", _scatter, ""),
    *[("all_to_all", kind, _all_to_all, kind) for kind in ("even", "uneven")],
    *[("broadcast", kind, _broadcast, kind) for kind in ("world", "subgroup")],
]


def _loss(program: Program, rank: int, power: int) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        y = program((rank + 2) * x)
        return ((rank + 1) * _ramp(y.numel()) * y.reshape(-1) ** power).sum()

    return loss


def _second(loss: Callable[[Tensor], Tensor], rank: int) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return (rank + 1) * gradient.sum()

    return slope


def _cell(rank: int, size: int, case: int, api: int, second: bool, numeric: bool) -> Any:
    """This rank's gradient by one API, or the text of an error. None: the API has no such collective."""
    warnings.simplefilter("ignore")
    _, _, build, kind = CASES[case]
    program = build(kind, rank, size)[api]
    if program is None:
        return None
    loss = _loss(program, rank, 2 if second else 1)
    x = torch.ones(1, dtype=torch.float64)
    try:
        loss = _second(loss, rank) if second else loss
        if numeric:
            return gradcheck.numerical_gradient(loss, x, eps=1e-4).item()
        return gradcheck.analytic_gradient(loss, x).item()
    except Exception as error:  # whatever an API raises is what the table shows
        return f"{type(error).__name__}: {error}".split("\n")[0]


def _ready(rank: int, size: int) -> None:
    """Nothing: what a call costs when the processes have to start is no part of its time."""


def _run(options: argparse.Namespace, case: int, api: int, numeric: bool = False) -> Any:
    run_ranks(_ready, options.ranks, timeout=600)
    try:
        results = run_ranks(
            _cell, options.ranks, case, api, options.second, numeric, timeout=options.timeout, grace=2.0
        )
    except RankError as error:
        texts = " ".join(error.failures.values())
        kept = [value for value in error.results.values() if isinstance(value, str)]
        return f"aborts ({texts.split('process died, ')[1][:13]})" if "died" in texts else kept or "hangs"
    return "none" if None in results else results


def _text(value: Any, truth: Any) -> tuple[str, bool]:
    """A cell's text, and whether it is right."""
    if isinstance(truth, str) or any(isinstance(entry, str) for entry in truth):
        raise SystemExit(f"no truth to compare with: {truth}")
    if isinstance(value, str):
        return value, False
    if any(isinstance(entry, str) for entry in value):
        return next(entry for entry in value if isinstance(entry, str)), False
    right = all(abs(a - b) <= 1e-5 * max(1, abs(b)) for a, b in zip(value, truth))
    return ", ".join(f"{entry:.6g}" for entry in value), right


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for case, (collective, op, *_) in enumerate(CASES):
        if options.only and collective not in options.only:
            continue
        if options.second and "tie" in op:  # no second derivative there
            continue
        truth = _run(options, case, api=2, numeric=True)
        row: dict[str, Any] = {"collective": collective, "op": op, "truth": _text(truth, truth)[0]}
        for api, name in enumerate(APIS):
            text, right = _text(_run(options, case, api), truth)
            row[name] = {"gradients": text, "right": right}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    order = "second derivatives" if options.second else "gradients"
    table = Table(title=f"x.grad on ranks 0 to {options.ranks - 1}, {order}, torch {torch.__version__}")
    for column in ("collective", "op", "truth", *APIS):
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [_colored(row[name]) for name in APIS]
        table.add_row(row["collective"], row["op"], row["truth"], *cells)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for name in APIS:
        console.print(f"{name}: {sum(row[name]['right'] for row in rows)} of {len(rows)} right")


def _colored(cell: dict[str, Any]) -> str:
    text = cell["gradients"] if len(cell["gradients"]) < 60 else cell["gradients"][:57] + "..."
    if cell["right"]:
        return f"[green]{text}[/green]"
    return "[dim]none[/dim]" if text == "none" else f"[red]✗ {text}[/red]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="world size (default 2)")
    parser.add_argument("--second", action="store_true", help="second derivatives")
    parser.add_argument("--only", nargs="+", metavar="COLLECTIVE", help="these collectives")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds until a call counts as a hang")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks must be 2 or more")
    rows = measure(options)
    show(rows, options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    wrong = [f"{row['collective']} {row['op']}" for row in rows if not row[APIS[-1]]["right"]]
    if wrong:
        raise SystemExit(f"minddp.functional is wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
