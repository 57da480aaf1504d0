"""The verdict on one program: is what ours did explained by what torch's class did?

The rule, where K is the first step at which torch's run went wrong on some rank (it raised, did not end, or its
parameters differ between ranks after a step):

- before K every observation is the same: to the bit on two ranks, where only one order of two summands exists, and to
  rounding on three;
- an error of ours before K is a difference, unless torch diverges or raises before the next ``optimizer.step()`` and
  ours raises on every rank;
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .program import to_json

__all__ = ["Difference", "judge", "meant"]

Results = list[dict[str, Any]]
_UPDATES = ("step", "join")
_WAITED = re.compile(r"[Tt]imed out|Connection closed|Connection reset|did not end|application timeout|Broken pipe")


@dataclass
class Difference:
    """``kind``: numbers, raises, hangs, dies, diverges, left over. ``detail`` names step, rank and both values."""

    kind: str
    step: int
    what: str
    detail: str

    @property
    def signature(self) -> str:
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.what)}"


def _tolerance(program: dict[str, Any]) -> tuple[float, float]:
    return (0.0, 0.0) if program["world"] == 2 else _rounding(program)


def _rounding(program: dict[str, Any]) -> tuple[float, float]:
    if has_low_precision(program):
        return 3e-2, 3e-2
    return (1e-9, 1e-10) if program.get("dtype") == "float64" else (1e-4, 1e-5)


def has_low_precision(program: dict[str, Any]) -> bool:
    """Whether something in it is bfloat16 or float16."""
    text = to_json(program)
    return any(word in text for word in ('"half"', '"fp16"', '"bf16"'))


def _amplified(program: dict[str, Any], label: str, tolerance: tuple[float, float]) -> tuple[float, float]:
    """What an input's gradient may differ by: batch norm's is what is left when nearly equal sums cancel."""
    if tolerance == (0.0, 0.0) or label.startswith(("net", "buffer")) or '"bn"' not in to_json(program):
        return tolerance
    return 10 * tolerance[0], 10 * tolerance[1]


def _same(a: Any, b: Any, tolerance: tuple[float, float]) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance == (0.0, 0.0):
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.allclose(a, b, *tolerance, equal_nan=True))


def _by_step(result: dict[str, Any], hooks: bool) -> dict[int, list[tuple[str, Any]]]:
    steps: dict[int, list[tuple[str, Any]]] = {}
    for step, label, value in result["observations"]:
        if hooks or not label.startswith("hook"):
            steps.setdefault(step, []).append((label, value))
    return steps


def _parameters(result: dict[str, Any], step: int) -> dict[str, Any]:
    return {
        label: value
        for at, label, value in result["observations"]
        if at == step and re.fullmatch(r"net\d+\.\S+(?<!\.grad)", label)
    }


def _updates(program: dict[str, Any], first: int, last: int) -> list[int]:
    """The steps in [first, last) that change parameters."""
    return [i for i, (verb, _) in enumerate(program["steps"]) if verb in _UPDATES and first <= i < last]


def _first_divergence(program: dict[str, Any], results: Results, start: int = 0) -> tuple[int, str] | None:
    end = min(result["at"] for result in results)
    for step in _updates(program, start, end):
        first, *others = (_parameters(result, step) for result in results)
        for name, value in first.items():
            if any(name in other and not _same(value, other[name], (0.0, 0.0)) for other in others):
                return step, name
    return None


def _waited(result: dict[str, Any]) -> bool:
    return result["end"] == "hung" or bool(_WAITED.search(result["error"]))


def _kind_of(label: str) -> str:
    if label.endswith(".grad"):
        return "a gradient" if label.startswith("net") else label
    if label.startswith("hook"):
        return "a gradient that a hook reads"
    return "a buffer" if label.startswith("buffer") else "a parameter" if label.startswith("net") else "a value"


def _show(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value.reshape(-1)[:4], precision=6, separator=", ")
    return repr(value)


def _is_mean_of_local(
    label: str, step: int, theirs: list[Any], ours: list[Any], rounding: tuple[float, float], divided: bool
) -> bool:
    """Torch's ranks disagree on a gradient without a word, and ours agree on the mean of theirs.

    ``divided``: torch's class may have divided them already, as it does with views and sparse ones when they arrive.
    """
    if not label.endswith(".grad"):
        return False
    found = []
    for results in (theirs, ours):
        values = [dict(result.get(step, [])).get(label) for result in results]
        known = [value for value in values if value is not None]
        if not known:
            return False
        found.append([np.zeros_like(known[0]) if value is None else value for value in values])
    local, mean = found
    disagree = any(not np.array_equal(local[0], other) for other in local[1:])
    agree = all(np.array_equal(mean[0], other) for other in mean[1:])
    divisors = (len(local), 1) if divided else (len(local),)
    return disagree and agree and any(np.allclose(sum(local) / by, mean[0], *rounding) for by in divisors)


def _is_local_divided(
    label: str, step: int, theirs: list[Any], ours: list[Any], rounding: tuple[float, float]
) -> bool:
    """On every rank torch's gradient is ours divided by the number of ranks, and the ranks disagree: it is in a
    bucket that never left."""
    values = [[dict(result.get(step, [])).get(label) for result in results] for results in (theirs, ours)]
    for their, our in zip(*values):
        if (their is None) != (our is None) or (
            our is not None and not np.allclose(their * len(ours), our, *rounding)
        ):
            return False
    first, *others = values[0]
    return any((first is None) != (other is None) or not np.array_equal(first, other) for other in others)


def _net_of(program: dict[str, Any], w: int) -> int:
    return int(program["wrappers"][w]["net"])


def _asks_for_local(program: dict[str, Any], step: int, label: str) -> bool:
    """Whether a net's gradients are meant to be local, of forwards under no_sync or past the wrapper: since zero_grad
    and the last backward that averages what there is. A loss of such a forward and of another one is averaged, and a
    backward past a wrapper whose forward waits for one."""
    local = False
    waiting: set[int] = set()
    found = re.match(r"net(\d+)\.", label)
    net = int(found[1]) if found else None
    for verb, a, ways in _backwards(program, step):
        if verb == "zero":
            local = False
        elif verb == "backward" and a.get("inputs") != "x":  # which comes to no parameter
            own = [way for way in ways if _net_of(program, way[0]) == net]
            stay = [sync is False or (via != "ddp" and w not in waiting) for w, via, sync in own or ways]
            local = all(stay) if own else any(stay)
            waiting -= {w for w, _, _ in ways}
        elif verb == "forward" and ways[0][1:] == ("ddp", True):
            waiting.add(ways[0][0])
    return local


def _an_old_forward_waits(program: dict[str, Any], step: int) -> bool:
    """Whether a backward under no_sync since zero_grad found a forward of the wrapper before, which may be alive."""
    waiting: set[int] = set()
    # Where a hook raises backward ends early, and the forward may go on waiting.
    raising = {a.get("w", 0) for verb, a in program["steps"] if verb == "hook" and a.get("fail")}
    old: set[int] = set()
    found = False
    for verb, a, ways in _backwards(program, step):
        if verb == "jacobian" or (verb == "forward" and ways[0][1:] == ("ddp", True)):
            waiting.add(a.get("w", 0))
        elif verb == "rewrap":
            old |= waiting & {a.get("w", 0)}  # kept on purpose, or by a hook, an output, a cycle
        elif verb == "backward":
            found = found or any(w in old and not sync for w, _, sync in ways)
            if a.get("inputs") != "x":  # which comes to no parameter
                waiting -= {w for w, via, _ in ways if via == "ddp" and w not in raising}
        elif verb == "zero":
            found = False
    return found


_Ways = list[tuple[int, str, bool]]


def _backwards(program: dict[str, Any], step: int) -> Iterator[tuple[str, dict[str, Any], _Ways]]:
    """The steps up to ``step`` that matter for whose a gradient is, each with the forwards it comes from.

    A forward is (wrapper, way, whether it is synchronized).
    """
    outputs: dict[str, _Ways] = {}
    for verb, a in program["steps"][: step + 1]:
        ways: _Ways = []
        if verb == "forward" and a.get("grad") is not False:
            ways = [(a.get("w", 0), a.get("via", "ddp"), a.get("sync") is not False)]
            ways += outputs.get(a.get("input", "x"), [])
        elif verb in ("loss", "penalty"):
            ways = [way for name in a.get("of", []) for way in outputs.get(name, [])]
        elif verb == "backward":
            ways = outputs.get(a["loss"], [])
        if verb in ("forward", "loss", "penalty") and ways:
            outputs[a.get("out", "_")] = ways
        if ways or verb in ("zero", "jacobian", "rewrap"):
            yield verb, a, ways


def _under_no_sync(program: dict[str, Any], step: int) -> bool:
    """Whether the last backward to parameters before a step was of a forward under no_sync."""
    last = [ways for verb, a, ways in _backwards(program, step) if verb == "backward" and a.get("inputs") != "x"]
    return bool(last) and any(not sync for _, _, sync in last[-1])


def _left_by_join(program: dict[str, Any], step: int) -> bool:
    """Whether a join, which ends with each rank's last own batch in ``.grad``, is not followed by its zero_grad."""
    left: set[int] = set()
    for verb, a in program["steps"][:step]:
        if verb == "join":
            left.add(a.get("w", 0))
        elif verb == "zero":
            left.discard(a.get("w", 0))
    return bool(left)


def judge(
    program: dict[str, Any],
    theirs: Results,
    ours: Results,
    apart: Callable[[], Results] | None = None,
    better: bool = True,
) -> Difference | None:
    """``apart()`` runs torch's class with a group for every wrapper; asked only where numbers differ.

    ``better=False`` lets the candidate go wrong where the reference does: for a class against itself.
    """
    difference = _judge(program, theirs, ours)
    if difference is not None and not better:
        if difference.kind not in ("numbers", "raises") and _goes_wrong(program, theirs):
            return None
    if difference is None or difference.kind not in ("numbers", "raises", "diverges") or apart is None:
        return difference
    alone = apart()
    if _judge(program, theirs, alone) is None or any(result["end"] != "ok" for result in alone):
        return difference
    if difference.kind == "raises" and all(result["end"] == "raised" and not _waited(result) for result in ours):
        return None
    return _judge(program, alone, ours)


def _goes_wrong(program: dict[str, Any], results: Results) -> bool:
    return any(result["end"] != "ok" for result in results) or _first_divergence(program, results) is not None


def _judge(program: dict[str, Any], theirs: Results, ours: Results) -> Difference | None:
    count = len(program["steps"])
    raised = min(result["at"] if result["end"] != "ok" else count for result in theirs)
    if any(result.get("left_over") for result in theirs):
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
        if result["end"] in ("died", "hung") and not _parts_ways(program, bad):
            kind = "dies" if result["end"] == "died" else "hangs"
            detail = f"rank {rank}: {result['error']}; with torch: {_ends(theirs)}"
            return Difference(kind, result["at"], result["error"], detail)
    return (
        _compare_numbers(program, theirs, ours, bad)
        or _judge_errors(program, theirs, ours, bad)
        or _judge_agreement(program, theirs, ours)
        or _judge_left_over(theirs, ours)
    )


def _compare_numbers(program: dict[str, Any], theirs: Results, ours: Results, bad: int) -> Difference | None:
    hooks = "gradient_as_bucket_view" not in to_json(program)  # there .grad may be half reduced, in torch too
    tolerance, divided = _tolerance(program), not hooks or '"sparse":true' in to_json(program)
    torch_steps = [_by_step(result, hooks) for result in theirs]
    our_steps = [_by_step(result, hooks) for result in ours]
    # Nets of which torch left a gradient local without a word, and ours did not: until it is None again they differ.
    corrected: set[str] = set()
    for step in range(-1, min(bad, *(result["at"] for result in ours))):
        verb, a = program["steps"][step] if step >= 0 else ("", {})
        if verb == "zero" and a.get("to_none") is not False:
            corrected.discard(f"net{_net_of(program, a.get('w', 0))}")
        if corrected:
            continue
        for rank in range(len(ours)):
            expected, got = torch_steps[rank].get(step, []), our_steps[rank].get(step, [])
            if len(expected) != len(got):
                detail = f"step {step}, rank {rank}: {len(expected)} observations with torch, {len(got)} with ours"
                return Difference("numbers", step, "how often hooks run", detail)
            for (label, a), (other, b) in zip(expected, got):
                if label == other and _same(a, b, _amplified(program, label, tolerance)):
                    continue
                if label == other and not _asks_for_local(program, step, label):
                    if _is_mean_of_local(label, step, torch_steps, our_steps, _rounding(program), divided):
                        corrected.add(label.partition(".")[0])
                        continue
                if label.partition(".")[0] in corrected and a is None and b is not None and not np.any(b):
                    continue  # used under no_sync before, by none in this backward: its mean is zero
                if not hooks and bad < len(program["steps"]) and not _updates(program, step, bad):
                    continue  # about to go wrong in torch: views of a reduction that nobody waits for
                detail = f"step {step}, rank {rank}, {label}: torch {_show(a)}, ours {other} {_show(b)}"
                what = _kind_of(label)
                if what == "a gradient" and _an_old_forward_waits(program, step):
                    what = "a gradient under no_sync, while an old wrapper's forward waits"
                elif what == "a gradient" and divided:
                    if _is_local_divided(label, step, torch_steps, our_steps, _rounding(program)):
                        what = "a gradient that was divided and never sent"
                return Difference("numbers", step, what, detail)
    return None


def _ends(results: Results) -> str:
    return "; ".join(f"rank {rank}: {result['error'] or 'ended'}" for rank, result in enumerate(results))


def _parts_ways(program: dict[str, Any], bad: int) -> bool:
    """Whether, after torch has gone wrong, some ranks alone call a wrapper: what is collective there has no peer."""
    after = program["steps"][bad:]
    return any(verb == "forward" and a.get("ranks") and a.get("via", "ddp") == "ddp" for verb, a in after)


def _uses_differ(program: dict[str, Any]) -> bool:
    """Whether some ranks use parameters that others do not: a branch, or an output in a loss."""
    return bool(re.search(r'"branch","ranks"|"head":\[', to_json(program)))


def _judge_errors(program: dict[str, Any], theirs: Results, ours: Results, bad: int) -> Difference | None:
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
    everywhere = all(result["end"] != "ok" for result in ours)  # what died here has been excused before
    if at < bad and not (explained and everywhere):
        return Difference("raises", at, error, detail)
    same_ranks = failed == [rank for rank, result in enumerate(theirs) if result["end"] == "raised"]
    if not everywhere and not same_ranks and not torch_waited and _updates(program, at, count):
        return Difference("raises on some ranks", at, error, detail)
    return None


def _judge_agreement(program: dict[str, Any], theirs: Results, ours: Results) -> Difference | None:
    diverged = _first_divergence(program, ours)
    if diverged is None:
        return None
    step, name = diverged
    values = ", ".join(_show(_parameters(result, step).get(name)) for result in ours)
    pairs = [(_parameters(a, step).get(name), _parameters(b, step).get(name)) for a, b in zip(theirs, ours)]
    alike = all(a is None or _same(a, b, _tolerance(program)) for a, b in pairs)
    theirs_diverged = _first_divergence(program, theirs)
    alike = alike or (theirs_diverged is not None and theirs_diverged[0] < step)  # there is nothing to be like
    what = "a parameter"
    if _under_no_sync(program, step):
        what = "local gradients under no_sync"
    elif alike and _left_by_join(program, step):
        what = "gradients that join left"
    return Difference("diverges", step, what, f"step {step}, {name} differs between ranks: {values}")


def _judge_left_over(theirs: Results, ours: Results) -> Difference | None:
    for rank, result in enumerate(ours):
        if result.get("left_over") and not any(other.get("left_over") for other in theirs):
            if all(other["end"] == "ok" for other in theirs):
                what = result["left_over"]
                return Difference("left over", result["at"], what, f"rank {rank}: {what}")
    return None


@functools.cache
def _entries() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("differences.toml")
    entries = tomllib.loads(path.read_text()).get("difference", [])
    return [entry for entry in entries if entry["id"] and entry["reason"]]


def meant(program: dict[str, Any], difference: Difference) -> str | None:
    """The id of the entry of ``differences.toml`` that explains it, if one does."""
    text = to_json(program)
    for entry in _entries():
        if entry.get("kind", difference.kind) != difference.kind:
            continue
        if not all(re.search(entry.get(name, ""), getattr(difference, name)) for name in ("what", "detail")):
            continue
        if all(re.search(part, text) for part in entry.get("program", [])):
            return entry["id"]
    return None
