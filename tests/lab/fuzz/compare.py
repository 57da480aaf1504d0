"""The verdict on one program: is what ours did explained by what torch's class did?

The rule, where K is the first step at which torch's run went wrong on some rank (it raised, did not end, or its
parameters differ between ranks after a step):

- before K every observation is the same: to the bit on two ranks, where only one order of two summands exists, and to
  rounding on three;
- an error of ours before K is a difference, unless torch diverges or raises before the next ``optimizer.step()`` and
  ours raises on every rank, or refuses there to step on a gradient that torch's ranks do not agree on;
- from K on ours may work or raise, but it does not hang (unless some ranks alone call a wrapper or use a parameter:
  where torch has stopped, nobody can say whether that should work), and where it goes on its ranks agree after every
  step;
- a gradient that torch leaves local without a word may be the mean of torch's in ours;
- where torch's numbers change when every wrapper has a group of its own, its collectives were mixed up between ranks:
  then ours is held to those numbers.

Divergences that are meant stand in ``differences.toml``; :func:`meant` says which entry explains a difference.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .numbers import Difference, Numbers, Results, same, show, tolerance_of
from .origins import left_by_join, under_no_sync
from .program import Program, to_json

__all__ = ["judge", "meant", "unsteady", "waited"]

_UPDATES = ("step", "join")
_WAITED = re.compile(
    r"[Tt]imed out|wait timeout|Connection closed|Connection reset|did not end|application timeout|Broken pipe"
)


def _parameters(result: dict[str, Any], step: int) -> dict[str, Any]:
    return {
        label: value
        for at, label, value in result["observations"]
        if at == step and re.fullmatch(r"net\d+\.\S+(?<!\.grad)", label)
    }


def _updates(program: Program, first: int, last: int) -> list[int]:
    """The steps in [first, last) that change parameters."""
    return [i for i, (verb, _) in enumerate(program["steps"]) if verb in _UPDATES and first <= i < last]


def _first_divergence(program: Program, results: Results) -> tuple[int, str] | None:
    for step in _updates(program, 0, min(result["at"] for result in results)):
        first, *others = (_parameters(result, step) for result in results)
        for name, value in first.items():
            if any(name in other and not same(value, other[name], (0.0, 0.0)) for other in others):
                return step, name
    return None


def _waited(result: dict[str, Any]) -> bool:
    return result["end"] == "hung" or bool(_WAITED.search(result["error"]))


def waited(difference: Difference) -> bool:
    """Whether some rank did not come in time."""
    return bool(_WAITED.search(f"{difference.what} {difference.detail}"))


def judge(
    program: Program, theirs: Results, ours: Results, apart: Callable[[], Results] | None = None
) -> Difference | None:
    """``apart()`` runs torch's class with a group for every wrapper; asked only where numbers differ."""
    difference = _judge(program, theirs, ours)
    if difference is None or difference.kind not in ("numbers", "raises", "diverges") or apart is None:
        return difference
    alone = apart()
    if _judge(program, theirs, alone) is None or any(result["end"] != "ok" for result in alone):
        return difference
    if difference.kind == "raises" and all(result["end"] == "raised" and not _waited(result) for result in ours):
        return None
    return _judge(program, alone, ours)


def unsteady(program: Program, theirs: Results, again: Results) -> bool:
    """Whether two runs with torch's class differ."""
    difference = _judge(program, theirs, again)
    wrong = any(result["end"] != "ok" for result in theirs) or _first_divergence(program, theirs) is not None
    return difference is not None and (difference.kind in ("numbers", "raises") or not wrong)


def _judge(program: Program, theirs: Results, ours: Results) -> Difference | None:
    count = len(program["steps"])
    raised = min(result["at"] if result["end"] != "ok" else count for result in theirs)
    if any(result["left_over"] for result in theirs):
        raised = 0
    if any("Expected to have finished reduction" in result["error"] for result in theirs):
        # It went wrong earlier, in the backward that did not finish; until it is noticed .grad is undefined.
        raised = max((i for i, step in enumerate(program["steps"][:raised]) if step[0] == "backward"), default=0)
    if any("mark a variable ready only once" in result["error"] for result in theirs):
        # What the iteration had sent in the backward before was half of it.
        before = [i for i, step in enumerate(program["steps"][:raised]) if step[0] == "backward"]
        raised = before[-1] if before and not _updates(program, before[-1], raised) else raised
    diverged = _first_divergence(program, theirs)
    bad = min(raised, diverged[0] if diverged else count)
    for rank, result in enumerate(ours):
        if result["end"] == "died" and any(other["end"] == "died" for other in theirs):
            return None  # the transport ended both
        if result["end"] == "died" and all(other["end"] == "raised" for other in theirs) and _uses_differ(program):
            return None  # beyond where torch stopped, some ranks' collectives have no peer
        if result["end"] in ("died", "hung") and not _parts_ways(program, bad):
            kind = "dies" if result["end"] == "died" else "hangs"
            detail = f"rank {rank}: {result['error']}; with torch: {_ends(theirs)}"
            return Difference(kind, result["at"], result["error"], detail)
    return (
        Numbers(program, theirs, ours, bad).difference()
        or _judge_errors(program, theirs, ours, bad)
        or _judge_agreement(program, theirs, ours)
        or _judge_left_over(theirs, ours)
    )


def _ends(results: Results) -> str:
    return "; ".join(f"rank {rank}: {result['error'] or 'ended'}" for rank, result in enumerate(results))


def _parts_ways(program: Program, bad: int) -> bool:
    """Whether, after torch has gone wrong, some ranks alone call a wrapper: what is collective there has no peer."""
    after = program["steps"][bad:]
    return any(verb == "forward" and a.get("ranks") and a.get("via", "ddp") == "ddp" for verb, a in after)


def _uses_differ(program: Program) -> bool:
    """Whether some ranks use parameters that others do not: a branch, or an output in a loss."""
    return bool(re.search(r'"branch","ranks"|"head":\[', to_json(program)))


def _judge_errors(program: Program, theirs: Results, ours: Results, bad: int) -> Difference | None:
    failed = [rank for rank, result in enumerate(ours) if result["end"] == "raised"]
    if not failed:
        return None
    count = len(program["steps"])
    own = [rank for rank in failed if not _waited(ours[rank])]
    first = min(own or failed, key=lambda rank: ours[rank]["at"])
    at, error = ours[first]["at"], ours[first]["error"]
    ends = "; ".join(f"rank {rank}: step {r['at']}, {r['error'] or 'ended'}" for rank, r in enumerate(ours))
    detail = f"{ends}\n  with torch: {_ends(theirs)}" + (f" (wrong from step {bad})" if bad < count else "")
    torch_waited = any(_waited(result) for result in theirs)
    waited = any(_waited(ours[rank]) for rank in failed)
    stopped = all(result["end"] == "raised" for result in theirs) and _uses_differ(program)
    if waited and not torch_waited and not stopped and not _parts_ways(program, bad):
        return Difference("hangs", at, error, detail)
    explained = bad < count and not _updates(program, at + 1, bad)
    everywhere = all(result["end"] in ("raised", "died") for result in ours)  # what died here has been excused before
    if at < bad and not (everywhere and (explained or _refused_rightly(program, theirs, at, error))):
        return Difference("raises", at, error, detail)
    same_ranks = failed == [rank for rank, result in enumerate(theirs) if result["end"] == "raised"]
    if not everywhere and not same_ranks and not torch_waited and _updates(program, at, count):
        return Difference("raises on some ranks", at, error, detail)
    return None


def _refused_rightly(program: Program, theirs: Results, step: int, error: str) -> bool:
    """Whether ours refuses to step on a gradient which in torch's run differs between ranks there.

    Their parameters may be the same by chance: Adam's first step goes by the signs.
    """
    if "gradients that were never averaged" not in error or program["steps"][step][0] != "step":
        return False
    nets = "|".join(str(w) for w in program["optimizers"][program["steps"][step][1]["opt"]]["of"])
    names = "|".join(re.escape(name) for name in re.findall(r"'([^']+)'", error))
    first, *others = (
        {label: value for at, label, value in result["observations"] if at == step} for result in theirs
    )
    labels = [label for label in first if re.fullmatch(rf"net({nets})\.({names})\.grad", label)]
    return any(not same(first[label], other.get(label), (0.0, 0.0)) for label in labels for other in others)


def _judge_agreement(program: Program, theirs: Results, ours: Results) -> Difference | None:
    diverged = _first_divergence(program, ours)
    if diverged is None:
        return None
    step, name = diverged
    values = ", ".join(show(_parameters(result, step).get(name)) for result in ours)
    pairs = [(_parameters(a, step).get(name), _parameters(b, step).get(name)) for a, b in zip(theirs, ours)]
    alike = all(a is None or same(a, b, tolerance_of(program)) for a, b in pairs)
    theirs_diverged = _first_divergence(program, theirs)
    alike = alike or (theirs_diverged is not None and theirs_diverged[0] < step)  # there is nothing to be like
    what = "a parameter"
    if under_no_sync(program, step, name):
        what = "local gradients under no_sync"
    elif alike and left_by_join(program, step):
        what = "gradients that join left"
    return Difference("diverges", step, what, f"step {step}, {name} differs between ranks: {values}")


def _judge_left_over(theirs: Results, ours: Results) -> Difference | None:
    if any(other["left_over"] or other["end"] != "ok" for other in theirs):
        return None
    for rank, result in enumerate(ours):
        if what := result["left_over"]:
            return Difference("left over", result["at"], what, f"rank {rank}: {what}")
    return None


@functools.cache
def _entries() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("differences.toml")
    return tomllib.loads(path.read_text())["difference"]


def meant(program: Program, difference: Difference) -> str | None:
    """The id of the entry of ``differences.toml`` that explains it, if one does."""
    text = to_json(program)
    for entry in _entries():
        if not re.fullmatch(entry.get("kind", ".*"), difference.kind):
            continue
        if not all(re.search(entry.get(name, ""), getattr(difference, name)) for name in ("what", "detail")):
            continue
        if all(re.search(part, text) for part in entry.get("program", [])):
            return entry["id"]
    return None
