"""Sets of moments, as sorted lists of intervals ``(begin, end)`` that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Intervals", "common", "length", "union", "without"]

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Any intervals as one set; empty ones are left out."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def common(first: Intervals, second: Intervals) -> Intervals:
    """What is in both sets."""
    return union((max(a, c), min(b, d)) for a, b in first for c, d in second)


def without(first: Intervals, second: Intervals) -> Intervals:
    """What is in the first set only."""
    left = list(first)
    for c, d in second:
        left = [piece for a, b in left for piece in ((a, min(b, c)), (max(a, d), b)) if piece[0] < piece[1]]
    return left


def length(intervals: Intervals) -> int:
    """Of all intervals together."""
    return sum(end - begin for begin, end in intervals)
