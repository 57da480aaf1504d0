"""Runs a pain with one class, and says in words how it ended."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.faults.logged import logged
from tests.ranks_pool import RankError, RankPool

from .programs import PAINS, WORLD, Wrong

CLASSES = {"torch": TorchDDP, "minddp": minddp.DistributedDataParallel}
LIMIT = 8.0  # seconds; a rank that reports nothing by then waits
# From the worst to the best: the process ends, nobody is told, replicas or numbers are wrong and nobody is told.
KINDS = ("dies", "waits", "differs", "wrong", "raises", "warns", "right")


@dataclass
class Outcome:
    """One of :data:`KINDS`, and what was reported."""

    kind: str
    text: str


def _run(rank: int, world_size: int, index: int, which: str) -> tuple[str, str, list[torch.Tensor]]:
    """(how it ended here, what was told, the tensors). A rank that has ended stays until all have, or for LIMIT,
    as one that goes on would: what is raised then, of a closed connection, tells nothing."""
    store, begin = dist.distributed_c10d._get_default_store(), time.monotonic()
    kind, text, tensors = "right", "", []
    with logged() as ours, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            tensors = [tensor.detach().clone() for tensor in PAINS[index].program(CLASSES[which], rank)]
        except Wrong as wrong:
            kind, text = "wrong", str(wrong)
        except Exception as error:
            closed = "gloo" in str(error) and not isinstance(error, minddp.LostPeer)  # the other one's end
            kind, text = ("waits", "") if closed else ("raises", f"{type(error).__name__}: {error}")
    ours += [str(warning.message) for warning in told if "minddp" in warning.filename]
    if kind == "right" and ours:
        kind, text = "warns", ours[0]
    store.add("ended", 1)
    while store.add("ended", 0) < world_size and time.monotonic() - begin < LIMIT:
        time.sleep(0.02)
    return kind, text, tensors


def run(index: int, which: str) -> Outcome:
    """How the pain of that index ends with that class, in processes of its own, as a program has."""
    pool = RankPool(WORLD)
    try:
        ranks = dict(enumerate(pool.run(_run, index, which, timeout=LIMIT + 10)))
    except RankError as error:
        died = any("process died" in text for text in error.failures.values())
        ranks = {rank: error.results.get(rank, ("dies" if died else "waits", "", [])) for rank in range(WORLD)}
    finally:
        pool.close()
    kinds = [kind for kind, _, _ in ranks.values()]
    kind = min(kinds, key=KINDS.index)
    if kind in ("right", "warns") and not _alike([tensors for _, _, tensors in ranks.values()]):
        kind = kind if kind == "warns" else "differs"
    says = PAINS[index].says if which == "minddp" else ""
    told = {rank: _short(text, says) for rank, (_, text, _) in ranks.items() if text}
    return Outcome(kind, _words(kind, kinds, told))


def _alike(all_tensors: list[list[torch.Tensor]]) -> bool:
    first, *others = all_tensors
    return all(len(first) == len(other) and all(map(torch.equal, first, other)) for other in others)


def _short(text: str, says: str, length: int = 150) -> str:
    """Its beginning, and around what it ``says``."""
    text = re.sub(r"process \d+ on [\w.-]+", "process …", " ".join(text.split()))
    text = re.sub(r"\b\d+(\.\d+)? (s|seconds)\b", "… s", text)
    found = re.search(says, text) if says else None
    begin = _cut(text, length)
    if found is None or found.end() <= len(begin) - 2:
        return begin
    if found.start() < length + 80:
        return _cut(text, found.end() + 40)
    return f"{begin} {_cut(text[found.start() - 40 :].partition(' ')[2], length)}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length].rsplit(" ", 1)[0] + " …"


def _words(kind: str, kinds: list[str], told: dict[int, str]) -> str:
    """What a reader is told: how it ended, who waits, and each text once."""
    ends = {"dies": "the process is aborted", "differs": "replicas differ, in silence", "right": "right"}
    words = [ends[kind]] if kind in ends else []
    waiting = [rank for rank, own in enumerate(kinds) if own == "waits"]
    if waiting:
        words.append(" and ".join(f"rank {rank}" for rank in waiting) + ": waits for the group's timeout")
    texts: dict[str, str] = {}
    for rank, text in told.items():
        texts.setdefault(re.sub(r"(?<=rank )\d", "…", text), f"rank {rank}: {text}")
    if len(texts) == 1 and len(told) == WORLD:
        return "; ".join([*words, f"every rank: {told[0]}"])
    return "; ".join([*words, *texts.values()])
