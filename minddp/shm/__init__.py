"""The shared-memory transport: a process-group backend for ranks on one machine.

Importing this module registers the backends ``"shm"`` and ``"auto"``::

    import torch.distributed as dist
    import minddp.shm

    dist.init_process_group("shm")              # or dist.new_group(ranks, backend="shm")
    dist.init_process_group("auto")             # "shm" where the ranks can share memory, Gloo otherwise

An all-reduce of a dense CPU tensor passes through memory that the ranks share, where Gloo sends it through a socket;
so does a barrier. Every other collective, and messages, go to a Gloo group of the same ranks, and what Gloo gives is
the answer. All ranks must run on one machine, in one PID namespace, as one user; otherwise every rank raises when the
group is made. Nothing appears in ``/dev/shm``, whose size does not matter, and nothing is left behind, however the
processes end. No other user can map the memory.

``"auto"`` carries CPU tensors, too. Where the ranks cannot share memory (several machines, containers, users) it is
Gloo, on all of them, and rank 0 warns with the reason; a rank that does not come at all is an error all the same.

What always holds
    An all-reduce gives the same bits on every rank; for two ranks those of Gloo. A rank that dies, leaves,
    makes another call or does not come within the group's timeout makes the others raise
    :class:`torch.distributed.DistBackendError`, which names it; the group's all-reduces are over then, and what the
    tensor of that call holds is undefined.
    MIN and MAX are IEEE 754's minimum and maximum: a NaN on any rank gives a NaN, and -0 is less than +0.

After a fork
    A forked child (a DataLoader's worker, say) is no rank: calls on the group raise there, and
    ``destroy_process_group()`` ends the child's copy only.

The native half is ``csrc/shm/``; its ``shm_backend.h`` gives the reading order.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import socket
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import environment
from .._extension import load

__all__ = ["AUTO_BACKEND", "BACKEND", "is_available"]

BACKEND = "shm"
"""The name under which the backend is registered."""

AUTO_BACKEND = "auto"
"""The name of the one that falls back to Gloo."""

_TEXT_BYTES = 1024  # of a rank's card, or of what it says instead


def is_available() -> bool:
    """Whether this build has ``"shm"``: it is on Linux, unless built with ``MINDDP_SHM=0``."""
    return _load() is not None


def _load() -> Any:
    """``minddp._shm``; None: it is not part of this build."""
    load()  # or raises, if what was built does not go with this torch
    spec = importlib.util.find_spec("minddp._shm")
    return None if spec is None else importlib.import_module("minddp._shm")


def _native() -> Any:
    extension = _load()
    if extension is None:
        raise RuntimeError(
            f'minddp was built without the backend "shm", which needs Linux (this is {platform.system()}): '
            'use backend "gloo"'
        )
    return extension


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    rest = _gloo(store, rank, size, timeout)
    backend, reason = _share_memory(rest, timeout)
    if backend is None:
        raise dist.DistBackendError(f"shm: {reason}")
    return backend


def _create_auto(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Of one mind with the other ranks, since :func:`_share_memory` is."""
    rest = _gloo(store, rank, size, timeout)
    backend, reason = _share_memory(rest, timeout)
    if backend is not None:
        return backend
    if rank == 0:
        told = f'backend "auto" is Gloo here, since "shm" cannot be: shm: {reason}'
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    return rest


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo group of these ranks; another one each time that they come to this store."""

    def times(rank: int, more: int) -> int:
        return int(store.add(f"minddp-shm/{rank}", more))

    mine = times(rank, 1)
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(f"minddp-shm-gloo/{mine}", store), rank, size, timeout)
    except RuntimeError as error:
        missing = next((str(other) for other in range(size) if times(other, 0) < mine), None)
        if missing is None:
            raise
        milliseconds = timeout // timedelta(milliseconds=1)
        raise dist.DistBackendError(
            f"shm: rank {missing} did not come to join the group within {milliseconds} ms, rank {rank} waited for "
            f"it: {error}"
        ) from error


def _share_memory(rest: Any, timeout: timedelta) -> tuple[Any, str]:
    """The group around ``rest``; or None, and why not, in the same words on all ranks. Collective.

    Raises:
        RuntimeError: Gloo's error.
    """
    own: Any = None
    try:
        own = _native().Segment()
        card = {"host": _host(), "name": socket.gethostname(), "segment": own.card()}
    except Exception as error:
        card = {"failure": f"{type(error).__name__}: {error}"[: _TEXT_BYTES // 2]}
    cards, reason = _compare([_parse(text) for text in _gather(rest, json.dumps(card))])
    if reason:
        return None, reason
    backend, failure = None, ""
    try:
        backend = _native().backend(rest, own, cards, timeout)
    except Exception as error:
        failure = str(error)
    failures = [f"; rank {rank}: {text}" for rank, text in enumerate(_gather(rest, failure)) if text]
    if failures:
        return None, (
            "the ranks could not map each other's memory (they must run as the same user, and /proc must be readable)"
            f"{''.join(failures)}. Use backend='gloo' where this cannot be arranged."
        )
    own.close()  # all have mapped it
    return backend, ""


def _gather(rest: Any, text: str) -> list[str]:
    """Every rank's text, by rank, cut where it is too long. Collective."""
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [mine.clone() for _ in range(rest.size())]
    rest.allgather([everyone], [mine]).wait()
    return [bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace") for theirs in everyone]


def _host() -> str:
    """Equal on ranks that can share memory.

    Two processes can open each other's memory if they run under one kernel, which draws a boot id when it starts, and
    see each other's process ids. ``MINDDP_SHM_HOST_ID`` tells apart what these do not.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {environment.shm_host_id()}"


def _parse(text: str) -> dict[str, Any]:
    """A rank's card. It is text from another process: whatever it holds, it is a card or says why not."""
    try:
        card = json.loads(text)
        if "failure" in card:
            return {"failure": str(card["failure"])}
        pid, descriptor, token = (int(number) for number in card["segment"])
        return {"host": str(card["host"]), "name": str(card["name"]), "segment": (pid, descriptor, token)}
    except (ValueError, TypeError, KeyError):
        return {"failure": "what it gives as its card is none of minddp's shm"}


def _compare(found: list[dict[str, Any]]) -> tuple[list[tuple[int, int, int]], str]:
    """The cards by rank, and why the ranks cannot share memory: "" if they may."""
    failed = [(rank, card["failure"]) for rank, card in enumerate(found) if "failure" in card]
    if failed:
        return [], "; ".join(f"rank {rank} could not join the group: {reason}" for rank, reason in failed)
    ranks: dict[str, str] = {}
    for rank, card in enumerate(found):
        ranks[card["host"]] = ranks.get(card["host"], f"{card['name']} has ranks") + f" {rank}"
    if len(ranks) > 1:
        return [], (
            "the ranks of a group must share one machine and one PID namespace (containers: --pid=host), but "
            f"these do not: {'; '.join(ranks.values())}. Use backend='gloo' across machines, "
            "and 'shm' for groups within one."
        )
    return [card["segment"] for card in found], ""


def _register() -> None:
    for name, create in ((BACKEND, _create), (AUTO_BACKEND, _create_auto)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])


_register()
