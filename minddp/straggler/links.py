"""How fast each link is, by messages between neighbours on a ring. Collective.

A ring's collectives end together on all ranks, so they do not tell whose link held them up; messages between two
ranks do. A rank has one partner at a time, so that no two messages share its link. The links are gone through several
times, more often where one seems slow, and the shortest time of each counts: a process that does not get its
processor for a moment is no slow link.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..messages import gather_objects
from .diagnosis import LINK_NBYTES

__all__ = ["can_be_measured", "measure_links", "rounds"]

_TAG = 0x6D64  # a receive of the program's own, which waits meanwhile, has another
_REPEATS = 2  # in a turn
_TURNS, _MORE_TURNS = 3, 12  # the links are gone through; where one seems slow
_SUSPICIOUS = 1.4
_SECONDS = 1.0  # after which a link is believed to be slow
_PAUSE = 0.02  # seconds, before a link that seems slow is looked at again: what has disturbed it may be over
_LEAST_RANKS = 3  # of two, the one link has none to be compared with


def can_be_measured(group: Any, device: torch.device) -> bool:
    """Whether the ranks of ``group``, whose parameters are on ``device``, have links to compare."""
    return device.type == "cpu" and type(group) is dist.ProcessGroup and group.size() >= _LEAST_RANKS


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """The links of a ring of ``size`` ranks, in rounds in which each rank has one at most."""
    links = [(rank, (rank + 1) % size) for rank in range(size)]
    even, odd, last = links[0 : size - size % 2 : 2], links[1::2], links[size - 1 :] if size % 2 else []
    return [links for links in (even, odd, last) if links]


def measure_links(group: Any) -> dict[tuple[int, int], float]:
    """Seconds by (sender, receiver). All ranks see the same times, so they stop together.

    REQUIRES: :func:`can_be_measured`.
    """
    shortest: dict[tuple[int, int], float] = {}
    spent = 0.0
    for turn in range(_MORE_TURNS):
        usual = statistics.median(shortest.values()) if shortest else 0.0
        seems_slow = max(shortest.values(), default=0.0) > _SUSPICIOUS * usual
        if turn >= _TURNS and (spent > _SECONDS or not seems_slow):
            break
        if turn >= _TURNS:
            time.sleep(_PAUSE)
        for src, dst, taken in itertools.chain(*gather_objects(list(_turn(group)), group)):
            spent += taken * _REPEATS
            shortest[src, dst] = min(taken, shortest.get((src, dst), taken))
    return shortest


def _turn(group: Any) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, seconds) of the links on which this rank sends."""
    rank = group.rank()
    message, ack = torch.zeros(LINK_NBYTES, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for link in [link for links in rounds(group.size()) for link in links if rank in link]:
        for src, dst in (link, link[::-1]):
            if rank == src:
                yield src, dst, min(_send(group, dst, message, ack) for _ in range(_REPEATS))
            else:
                _receive(group, src, message, ack)


def _receive(group: Any, src: int, message: torch.Tensor, ack: torch.Tensor) -> None:
    for _ in range(_REPEATS):
        group.recv([message], src, _TAG).wait()
        group.send([ack], src, _TAG).wait()


def _send(group: Any, dst: int, message: torch.Tensor, ack: torch.Tensor) -> float:
    begin = time.perf_counter()
    group.send([message], dst, _TAG).wait()
    group.recv([ack], dst, _TAG).wait()
    return time.perf_counter() - begin
