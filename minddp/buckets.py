"""Which gradients travel together: sizes and caps in, lists of parameter indices out. Pure.

A bucket is the unit of communication: one flat buffer, one collective. Large buckets pay the collective's
latency rarely; small ones let communication begin while backward still runs. What is reduced last has no
backward left to hide behind, so the last bucket is a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import messages

Buckets = list[list[int]]

# Buckets are filled from the back. A layer's bias arrives just before its weight, so it is met just after the weight
# has closed a bucket. In the next bucket it would be the last gradient to arrive, and hold that bucket up. So a
# closed bucket still takes gradients of up to this part of its cap.
_ROOM = 1 / 16
_WHAT = "the new buckets, before forward"


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    caps: Sequence[int],
    last_cap: int | None = None,
) -> Buckets:
    """Splits ``order`` into buckets, listed in the order in which they become complete.

    Args:
        nbytes: bytes of each parameter's gradient, by parameter index.
        kinds: what may not share a bucket ((dtype, device), say), by parameter index.
        order: parameter indices by expected arrival.
        caps: bytes at which a kind's i-th launched bucket closes; the last entry repeats. A bucket closes once it
            has reached its cap, so it exceeds it by less than one parameter. With one entry it may then take a
            sixteenth of the cap more.
        last_cap: where ``caps`` has one entry, the cap of the bucket that is launched last.
    """
    if len(caps) > 1:
        full, left = _fill(nbytes, kinds, order, lambda i: caps[min(i, len(caps) - 1)])
        buckets = full + left
    else:
        # From the back, so that what is left over, and not full, is launched first.
        full, left = _fill(nbytes, kinds, order[::-1], lambda i: (last_cap or caps[0]) if i == 0 else caps[0], _ROOM)
        buckets = [bucket[::-1] for bucket in full + left]
    position = {index: i for i, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def torchs_buckets(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], caps: Sequence[int]
) -> Buckets:
    """As torch's class along ``order``: the full ones in the order in which they were filled, then each kind's rest.
    The kind whose first gradient came last goes first."""
    came = {kind: i for i, kind in reversed(list(enumerate(kinds[index] for index in order)))}
    full, left = _fill(nbytes, kinds, order, lambda i: caps[min(i, len(caps) - 1)])
    return full + sorted(left, key=lambda bucket: -came[kinds[bucket[0]]])


def unordered_buckets(nbytes: Sequence[int], kinds: Sequence[Hashable], caps: Sequence[int]) -> Buckets:
    """Before anybody knows the order, as torch's class: filled from the first parameter, launched from the last."""
    full, left = _fill(nbytes, kinds, range(len(nbytes)), lambda i: caps[min(i, len(caps) - 1)])
    return sorted(full + left, key=min, reverse=True)


def _fill(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    cap: Callable[[int], int],
    room: float = 0.0,
) -> tuple[Buckets, Buckets]:
    """Those that are full, and those that are not."""
    closed: Buckets = []
    filling: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    counts: dict[Hashable, int] = {}
    last: dict[Hashable, list[int]] = {}  # the bucket that was closed last, and what it still takes
    takes: dict[Hashable, float] = {}
    for index in order:
        kind = kinds[index]
        takes[kind] = takes.get(kind, -1.0) - nbytes[index]
        if room and takes[kind] >= 0:
            last[kind].append(index)
            continue
        filling.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + nbytes[index]
        limit = cap(counts.get(kind, 0))
        if sizes[kind] >= limit:
            last[kind], takes[kind] = filling.pop(kind), limit * room
            counts[kind] = counts.get(kind, 0) + 1
            closed.append(last[kind])
            del sizes[kind]
    return closed, list(filling.values())


def ready_order(ready_ns: Sequence[int]) -> tuple[list[int], list[int]]:
    """(indices by arrival, indices that never arrived) from the reducer's time stamps.

    What never arrived is listed from the highest index down: what is defined last usually comes first.
    """
    absent = [i for i in reversed(range(len(ready_ns))) if ready_ns[i] < 0]
    arrived = [i for i in reversed(range(len(ready_ns))) if ready_ns[i] >= 0]
    return sorted(arrived, key=lambda i: ready_ns[i]), absent


@dataclass(frozen=True)
class Agreed:
    """What holds for the new buckets.

    Attributes:
        arrived: parameter indices by arrival.
        absent: those that never arrived.
        as_torch: they are cut as torch's class cuts them.
        token: a number that no other reducer has.
    """

    arrived: list[int]
    absent: list[int]
    as_torch: bool
    token: int


def agree_on_order(mine: Agreed, group: dist.ProcessGroup, device: torch.device) -> Agreed:
    """Rank 0's, on every rank; and torch's buckets where a rank asks for them. Collective.

    Ranks may observe different orders (branches, threads), and a bucket must hold the same parameters on all.

    Raises:
        RuntimeError: what came is no such order.
    """
    if group.size() == 1:
        return mine
    message = torch.tensor([mine.token, len(mine.arrived), *mine.arrived, *mine.absent], device=device)
    messages.broadcast_from(group, message, 0, _WHAT)
    token, count, *indices = message.tolist()
    if sorted(indices) != sorted([*mine.arrived, *mine.absent]):
        raise RuntimeError(
            f"DistributedDataParallel on rank {group.rank()} got something else than the order of new buckets that "
            "rank 0 was to send: the ranks called collectives in different orders. A forward that only some ranks "
            "run, with buffers to broadcast, does that. Run it on all ranks, or call the wrapper's module there."
        )
    asks = torch.tensor([int(mine.as_torch)], device=device)
    asked = [torch.zeros_like(asks) for _ in range(group.size())]
    messages.all_gather(group, asked, asks, _WHAT)
    return Agreed(indices[:count], indices[count:], any(map(bool, asked)), token)


def split_by_kind(buckets: Buckets, kinds: Sequence[Hashable]) -> Buckets:
    """A bucket of several kinds becomes one for each: a plan that was made where all of it travelled alike."""
    found: Buckets = []
    for bucket in buckets:
        parts: dict[Hashable, list[int]] = {}
        for index in bucket:
            parts.setdefault(kinds[index], []).append(index)
        found += parts.values()
    return found


def check_buckets(buckets: Buckets, names: Sequence[str], kinds: Sequence[Hashable]) -> None:
    """Raises ValueError unless every parameter is in one bucket and every bucket of one kind."""
    seen = sorted(index for bucket in buckets for index in bucket)
    if seen != list(range(len(names))):
        wrong = [name for i, name in enumerate(names) if seen.count(i) != 1] or [
            f"index {i}" for i in seen if not 0 <= i < len(names)
        ]
        raise ValueError(f"buckets: every parameter must be in exactly one bucket; this does not hold for {wrong}")
    for bucket in buckets:
        if len({kinds[index] for index in bucket}) != 1:
            raise ValueError(
                f"buckets: a bucket must hold parameters of one dtype and device (and a parameter with sparse "
                f"gradients alone), but one holds {[names[index] for index in bucket]}"
            )
