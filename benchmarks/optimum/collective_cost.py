"""What one allreduce of M bytes costs: cost functions, and their measurement on a live group.

A cost is any callable ``nbytes -> seconds``: ``minddp.planner.LinearCost`` where times lie on a line, and
:class:`TableCost` where they do not. :func:`fit_cost` measures the group's own; every rank gets the same answer.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minddp.planner import Cost, LinearCost
from minddp.planner.optimal import plain_number

__all__ = ["TableCost", "fit_cost", "fit_linear", "fit_samples", "measure_allreduce"]


class TableCost:
    """Measured points joined by straight lines; beyond the last one its slope goes on.

    Below the first point the first point's seconds are used: a smaller message saves no latency.

    Args:
        nbytes: at least two sizes, in bytes, without repeats.
        seconds: the time of each, at least 0. A time below a smaller size's is raised to it, so that
            the cost never falls as messages grow.
    """

    def __init__(self, nbytes: Sequence[int], seconds: Sequence[float]):
        if len(nbytes) != len(seconds) or len(nbytes) < 2:
            raise ValueError(
                "TableCost: nbytes and seconds must have the same length, at least 2, "
                f"got {len(nbytes)} and {len(seconds)}"
            )
        points = sorted(
            (plain_number("TableCost: nbytes", size), float(plain_number("TableCost: seconds", time)))
            for size, time in zip(nbytes, seconds, strict=True)
        )
        if any(left[0] == right[0] for left, right in itertools.pairwise(points)):
            raise ValueError("TableCost: nbytes holds a size twice; pass one (median) time a size")
        self.nbytes = [size for size, _ in points]
        self.seconds: list[float] = []
        for _, value in points:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"TableCost: seconds must be finite and at least 0, got {value!r}")
            self.seconds.append(max(value, self.seconds[-1]) if self.seconds else value)

    def __call__(self, nbytes: int) -> float:
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.nbytes, nbytes), len(self.nbytes) - 1)
        x0, x1 = self.nbytes[right - 1], self.nbytes[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)

    def __repr__(self) -> str:
        return f"TableCost({self.nbytes}, {self.seconds})"


def fit_linear(
    nbytes: Sequence[int],
    seconds: Sequence[float],
    counts: Sequence[int] | None = None,
    *,
    relative: bool = True,
) -> LinearCost:
    """The line with the least sum of absolute errors.

    Absolute errors (not squares) make it robust: a minority of wild samples does not move it. Such a
    line can always be chosen through two of the points, or through one with a bound at 0 (a vertex of
    the linear program), so all of those are tried; of many samples a few dozen are used.

    Args:
        nbytes: bytes of each sample, at least one sample.
        seconds: the time of each, above 0.
        counts: how many messages, one after another, each sample's bytes and time are of; 1 if None.
        relative: each error counts in parts of its sample's time, which gives a small message's
            microseconds the weight of a large one's milliseconds; else in seconds.

    Raises:
        ValueError: lengths differ, nothing was given, or a time is not above 0.
    """
    counts = [1] * len(nbytes) if counts is None else counts
    given = sorted((int(m), int(k), float(t)) for m, k, t in zip(nbytes, counts, seconds, strict=True))
    if not given or any(not (math.isfinite(t) and t > 0) for _, _, t in given):
        raise ValueError("fit_linear: seconds must hold at least one time, each finite and above 0")
    step = math.ceil(len(given) / 64)
    samples = given[step // 2 :: step]

    def error(line: LinearCost) -> float:
        a, b = line.latency_seconds, line.seconds_per_byte
        return sum(abs(count * a + size * b - t) / (t if relative else 1) for size, count, t in samples)

    return min(_candidate_lines(samples), key=error)


def _candidate_lines(samples: list[tuple[int, int, float]]) -> list[LinearCost]:
    lines = [LinearCost(t / count, 0.0) for _, count, t in samples]
    lines += [LinearCost(0.0, t / size) for size, _, t in samples if size > 0]
    for (m0, k0, t0), (m1, k1, t1) in itertools.combinations(samples, 2):
        determinant = k0 * m1 - k1 * m0
        if determinant != 0:
            latency = (t0 * m1 - t1 * m0) / determinant
            slope = (k0 * t1 - k1 * t0) / determinant
            if latency >= 0 and slope >= 0:
                lines.append(LinearCost(latency, slope))
    return lines


def fit_samples(nbytes: Sequence[int], seconds: Sequence[float], tolerance: float = 0.25) -> Cost:
    """A line where the sizes' median times lie within ``tolerance`` (relative) of it, else a table.

    Args:
        nbytes: sizes in bytes; repeats of a size are samples of one time.
        seconds: the time of each, above 0.
    """
    by_size: dict[int, list[float]] = {}
    for size, t in zip(nbytes, seconds, strict=True):
        by_size.setdefault(size, []).append(t)
    sizes = sorted(by_size)
    times = [statistics.median(by_size[size]) for size in sizes]
    line = fit_linear(sizes, times)
    worst = max(abs(line(size) - t) / t for size, t in zip(sizes, times, strict=True))
    return line if worst <= tolerance or len(sizes) < 4 else TableCost(sizes, times)


def measure_allreduce(
    group: Any = None,
    *,
    max_nbytes: int = 32 << 20,
    device: torch.device | str | None = None,
    budget_seconds: float = 3.0,
) -> tuple[list[int], list[float]]:
    """Times allreduces of 1 KiB and up, each size four times the last, on the live group.

    A collective: every rank of ``group`` calls it at the same point with the same arguments. Sizes
    stop growing after ``max_nbytes``, or when the next is expected to overrun ``budget_seconds``.

    Returns:
        Sizes in bytes and median seconds (of the slowest rank), the same on every rank.
    """
    group = group if group is not None else dist.group.WORLD
    device = torch.device(device) if device is not None else _device_of(group)
    size, spent = 1 << 10, 0.0
    sizes: list[int] = []
    seconds: list[float] = []
    while size <= max(max_nbytes, 1 << 12):
        median, total = _agree_max(_time_size(group, size, device), group, device)
        sizes.append(size)
        seconds.append(median)
        spent += total
        if len(sizes) > 1 and spent + 4 * total > budget_seconds:
            break
        size *= 4
    return sizes, seconds


def fit_cost(
    group: Any = None,
    *,
    max_nbytes: int = 32 << 20,
    device: torch.device | str | None = None,
    budget_seconds: float = 3.0,
    tolerance: float = 0.25,
) -> Cost:
    """Measures what an allreduce on ``group`` costs.

    A collective: every rank of ``group`` calls it at the same point with the same arguments.

    Args:
        group: a process group; the default group when None.
        max_nbytes: the largest message tried.
        device: where the messages lie; by default the current CUDA device for NCCL, else the CPU.
        budget_seconds: about how long measuring may take.
        tolerance: the largest relative error at which a line is preferred to a table.

    Returns:
        A :class:`LinearCost`, or a :class:`TableCost` when the times do not lie on a line; equal on
        all ranks.
    """
    sizes, seconds = measure_allreduce(group, max_nbytes=max_nbytes, device=device, budget_seconds=budget_seconds)
    return fit_samples(sizes, seconds, tolerance)


def _device_of(group: Any) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _time_size(group: Any, nbytes: int, device: torch.device) -> tuple[float, float]:
    """Median and sum of the seconds that allreduces of ``nbytes`` took on this rank."""
    message = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    repeats = 9 if nbytes <= 1 << 16 else 5 if nbytes <= 1 << 20 else 3
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]), sum(times)


def _agree_max(values: tuple[float, ...], group: Any, device: torch.device) -> list[float]:
    message = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in message.tolist()]
