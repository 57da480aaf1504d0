"""Collectives take processor time from the backward beside them: a replay that knows it.

Where the ranks of a machine compute on all of its cores, whatever moves and sums bytes runs in place of backward.
``taken`` says how many seconds of backward's work a collective costs while it runs beside it; none where a core is
free. A measured backward has lost to its own collectives already: :func:`without_transfers` gives it back, and
:func:`replay` takes what other collectives would.

A rate is even: a collective of T seconds that takes t of them leaves backward the part 1 - t/T, from its begin to its
end. What begins after backward takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .backward_profile import BackwardProfile
from .collective_cost import Cost, LinearCost

__all__ = ["FREE", "Transfer", "replay", "transfers", "without_transfers"]

FREE = LinearCost(0.0, 0.0)  # collectives have a core of their own
_MOST = 0.9  # of a collective's time: backward always gets on


class Transfer(NamedTuple):
    """A collective beside backward, in seconds since backward began.

    Attributes:
        begin, end: when bytes were on their way.
        taken: of backward's seconds, if it ran all the while.
    """

    begin: float
    end: float
    taken: float


def transfers(collectives: Iterable[tuple[int, float, float]], taken: Cost) -> list[Transfer]:
    """Collectives as measured (bytes, launch, end; in launch order), one after another.

    Args:
        collectives: as :class:`StepTimes` has them; without an end they are left out.
        taken: seconds of backward's work that one of so many bytes costs.
    """
    found: list[Transfer] = []
    for nbytes, launch, end in collectives:
        begin = max(launch, found[-1].end) if found else launch
        if end > begin:
            found.append(_transfer(begin, end, taken(nbytes)))
    return found


def without_transfers(profile: BackwardProfile, beside: Sequence[Transfer]) -> BackwardProfile:
    """The same backward, had it had the processor to itself."""

    def alone(moment: float) -> float:
        return moment - sum(_lost_until(moment, transfer) for transfer in beside)

    ready = [alone(moment) for moment in profile.ready_seconds]
    backward = alone(profile.backward_seconds)
    return BackwardProfile(ready, profile.nbytes, backward, profile.forward_seconds, profile.tail_seconds)


def replay(
    profile: BackwardProfile, buckets: Sequence[Sequence[int]], cost: Cost, taken: Cost
) -> tuple[list[Transfer], float]:
    """The collectives, and when backward ends.

    Args:
        profile: a backward that has the processor to itself.
        buckets: positions of its gradients, in launch order.
        cost: seconds of a collective of so many bytes.
        taken: seconds of backward's work that it costs.
    """
    found: list[Transfer] = []
    for bucket in buckets:
        launch = _reached(max((profile.ready_seconds[position] for position in bucket), default=0.0), found)
        begin = max(launch, found[-1].end) if found else launch
        nbytes = sum(profile.nbytes[position] for position in bucket)
        found.append(_transfer(begin, begin + cost(nbytes), taken(nbytes)))
    return found, _reached(profile.backward_seconds, found)


def _transfer(begin: float, end: float, taken: float) -> Transfer:
    return Transfer(begin, end, min(taken, _MOST * (end - begin)))


def _lost_until(moment: float, transfer: Transfer) -> float:
    if moment >= transfer.end:
        return transfer.taken
    return transfer.taken * max(0.0, moment - transfer.begin) / (transfer.end - transfer.begin)


def _reached(work: float, beside: Sequence[Transfer]) -> float:
    """When backward has done ``work`` seconds of its own, beside collectives one after another."""
    moment = work
    for begin, end, taken in beside:
        if moment <= begin:
            break
        left = (moment - begin) / (1 - taken / (end - begin)) if end > begin else 0.0
        moment = min(begin + left, moment + taken) if end > begin else moment
    return moment
