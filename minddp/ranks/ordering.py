"""Are the ranks issuing the same collectives in the same order? Debug mode's answer.

Overview
    A collective has no name on the wire: the third call of one rank meets the third call of the
    others, whatever they are. Ranks that branch apart hang, abort, or add unrelated numbers. In debug
    mode every rank therefore keeps, for each group, a rolling digest of what it issued (op, dtype,
    shape) and the last few calls as text. Digests are compared

    * in the header that precedes each collective of ``minddp.functional`` (for free), and
    * by :func:`check` at the end of an iteration, which also sees what ran in backward.

    Both raise :class:`CollectiveOrderError` on every rank, with every rank's last collectives. A rank
    that waits longer than ``MINDDP_ORDER_TIMEOUT`` seconds (60) for a collective raises as well.

What always holds
    Nothing here calls a collective of the group, whose order may be what is broken: reports travel
    through the default process group's store. Outside debug mode nothing is recorded.

Debug mode is ``MINDDP_DEBUG=1``, or torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. It costs a write to
the store (some 50 microseconds) per collective.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .. import environment
from .waiting import wait_for

__all__ = ["CollectiveOrderError", "check", "digest", "enabled", "record", "wait"]

_KEPT = 12  # calls shown in an error


class CollectiveOrderError(RuntimeError):
    """The ranks of a group did not issue the same collectives in the same order."""


@dataclass
class _History:
    """What this rank issued on one group since the group was made."""

    digest: int = 0
    count: int = 0
    checks: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, call: str) -> None:
        data = self.digest.to_bytes(8, "little") + call.encode()
        self.digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
        self.count += 1
        self.last.append(call)

    def report(self) -> str:
        return json.dumps({"digest": self.digest, "count": self.count, "last": list(self.last)})


_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def enabled() -> bool:
    """Whether debug mode is on; read from the environment at each call."""
    return environment.debug()


def _resolve(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _history(group: Any) -> _History:
    return _histories.setdefault(group, _History())


def _store(group: Any) -> Any:
    prefix = f"minddp/order/{group.group_name}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def digest(group: Any) -> int:
    """63 bits that ranks share which issued the same collectives on ``group``; 0 outside debug mode."""
    return _history(_resolve(group)).digest if enabled() else 0


def record(group: Any, call: str) -> None:
    """Notes that this rank issues ``call`` on ``group``; does nothing outside debug mode.

    ``call`` must be the same text on every rank: what differs by right, such as the rows that each
    rank contributes to an uneven all_gather, stays out of it.
    """
    if not enabled():
        return
    group = _resolve(group)
    history = _history(group)
    history.add(call)
    _store(group).set(f"live/{dist.get_rank(group)}", history.report())


def wait(work: Any, group: Any) -> None:
    """``work.wait()``; in debug mode with a timeout, and with everybody's last collectives in the error."""
    if work is None:
        return
    if not enabled():
        wait_for(work, _resolve(group), "a collective of minddp.functional or SyncBatchNorm")
        return
    try:
        work.wait(timedelta(seconds=environment.order_timeout()))
    except RuntimeError as error:
        raise CollectiveOrderError(
            f"rank {dist.get_rank(group)} waited {environment.order_timeout():g} s or lost the connection inside "
            f"a collective ({error}).\n{describe(_live_reports(_resolve(group)))}"
        ) from error


def check(group: Any = None, timeout: float | None = None) -> None:
    """Compares what the ranks of ``group`` issued so far; call it on every rank at the end of an iteration.

    Does nothing outside debug mode.

    Args:
        group: the process group, the default one by default.
        timeout: seconds to wait for the other ranks; ``MINDDP_ORDER_TIMEOUT`` by default.

    Raises:
        CollectiveOrderError: on every rank that calls it, when digests differ or a rank does not come in
            time; the text shows the last collectives of every rank.
    """
    if not enabled():
        return
    group = _resolve(group)
    reports, missing = _exchange(group, environment.order_timeout() if timeout is None else timeout)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise CollectiveOrderError(f"rank {names} did not reach the end of the iteration.\n{describe(reports)}")
    if len({report["digest"] for report in reports.values()}) > 1:
        raise CollectiveOrderError(f"the ranks issued different collectives.\n{describe(reports)}")


def _exchange(group: Any, timeout: float) -> tuple[dict[int, Any], list[int]]:
    """Every rank's report at the same check, and the ranks that did not report in time."""
    history, store = _history(group), _store(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    history.checks += 1
    store.set(f"check/{history.checks}/{rank}", history.report())
    # Whoever is at check n has read everything of check n - 1, so n - 2 is read by nobody any more.
    store.delete_key(f"check/{history.checks - 2}/{rank}")
    deadline = time.monotonic() + timeout
    reports, missing = {}, []
    for other in range(size):
        key = f"check/{history.checks}/{other}"
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            reports[other] = json.loads(store.get(key))
        except RuntimeError:
            missing.append(other)
    if missing:
        reports.update({r: report for r, report in _live_reports(group).items() if r in missing})
    return reports, missing


def _live_reports(group: Any) -> dict[int, Any]:
    """What each rank last wrote, whether or not it comes to the comparison."""
    store, reports = _store(group), {}
    for rank in range(dist.get_world_size(group)):
        key = f"live/{rank}"
        if store.check([key]):
            reports[rank] = json.loads(store.get(key))
    return reports


def describe(reports: dict[int, Any]) -> str:
    """The ranks' last collectives side by side, oldest first; the first that differs is marked."""
    first = _first_difference(reports)
    lines = []
    for rank, report in sorted(reports.items()):
        lines.append(f"rank {rank}, {report['count']} collectives, the last {len(report['last'])}:")
        start = report["count"] - len(report["last"])
        for number, call in enumerate(report["last"], start=start + 1):
            mark = "  <-- differs" if number == first else ""
            lines.append(f"  {number}. {call}{mark}")
        if first is not None and report["count"] < first:
            lines.append(f"  {first}. nothing  <-- differs")
    return "\n".join(lines)


def _first_difference(reports: dict[int, Any]) -> int | None:
    """The number of the first remembered call that is not the same on all ranks."""
    numbered = [dict(enumerate(r["last"], start=r["count"] - len(r["last"]) + 1)) for r in reports.values()]
    oldest = max((min(calls, default=1) for calls in numbered), default=1)
    newest = max((max(calls, default=0) for calls in numbered), default=0)
    for number in range(oldest, newest + 1):
        if len({calls.get(number) for calls in numbered}) > 1:
            return number
    return None
