"""Who owns which parameter, and in which pieces the new values travel: functions of shapes, the same on all ranks.

Owners are chosen group by group. The largest parameters are given away first, each to the rank with the least work so
far (Graham's rule), so a rank's share of a group is at most 1/ranks of the group plus its largest parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE_BYTES = 4 << 20  # of one rank's values, at least: smaller messages pay latency, larger ones hide nothing


def work(parameter: torch.Tensor, orthogonalizes: bool) -> float:
    """What one step of ``parameter`` costs, in units of its own: bytes, or a matrix's multiplications.

    A Newton-Schulz iteration of an m x n matrix, m <= n, multiplies m x n by n x m, m x m by m x m, and m x m by
    m x n: 2 m^2 n + m^3 multiplications.
    """
    if orthogonalizes and parameter.dim() == 2:
        small, large = sorted(parameter.shape)
        return float(2 * small * small * large + small**3)
    return float(parameter.nbytes)


def owners(works: Sequence[float], loads: list[float]) -> list[int]:
    """The owner of each parameter of one group; adds to ``loads``, what each rank has of all groups.

    Within a group the rank with the least of it comes first; of equal ones that with the least of all groups.
    """
    mine, chosen = [0.0] * len(loads), [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: (-works[i], i)):
        rank = min(range(len(loads)), key=lambda r: (mine[r], loads[r], r))
        chosen[index] = rank
        mine[rank] += works[index]
        loads[rank] += works[index]
    return chosen


def pieces(sizes: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Cuts each rank's list of parameters into as many runs as all others' lists, of about the same bytes each.

    Args:
        sizes: for each rank, the bytes of its parameters in order.

    Returns:
        For each piece, for each rank, the places in its list that are in the piece.
    """
    count = max(1, max(map(sum, sizes), default=0) // PIECE_BYTES)
    cut: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(count)]
    for rank, theirs in enumerate(sizes):
        seen, total = 0, max(1, sum(theirs))
        for place, size in enumerate(theirs):  # the piece in which its middle lies
            cut[min(count - 1, (2 * seen + size) * count // (2 * total))][rank].append(place)
            seen += size
    return cut
