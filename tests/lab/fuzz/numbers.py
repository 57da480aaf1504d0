"""Whether two runs of one program saw the same numbers, up to the step at which torch's went wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import origins
from .origins import holders, kin, may_be_divided
from .program import Program, to_json

__all__ = ["Difference", "Numbers", "Results", "has_low_precision", "same", "show", "tolerance_of"]

Results = list[dict[str, Any]]


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


def tolerance_of(program: Program) -> tuple[float, float]:
    return (0.0, 0.0) if program["world"] == 2 else _rounding(program)


def _rounding(program: Program) -> tuple[float, float]:
    if has_low_precision(program):
        return 3e-2, 3e-2
    return (1e-9, 1e-10) if program.get("dtype") == "float64" else (1e-4, 1e-5)


def has_low_precision(program: Program) -> bool:
    """Whether something in it is bfloat16 or float16."""
    text = to_json(program)
    return any(word in text for word in ('"half"', '"fp16"', '"bf16"'))


def _amplified(program: Program, label: str, tolerance: tuple[float, float]) -> tuple[float, float]:
    """What an input's gradient may differ by: batch norm's is what is left when nearly equal sums cancel."""
    if tolerance == (0.0, 0.0) or label.startswith(("net", "buffer")) or '"bn"' not in to_json(program):
        return tolerance
    return 10 * tolerance[0], 10 * tolerance[1]


def same(a: Any, b: Any, tolerance: tuple[float, float]) -> bool:
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


def _kind_of(label: str) -> str:
    if label.endswith(".grad"):
        return "a gradient" if label.startswith("net") else label
    if label.startswith("hook"):
        return "a gradient that a hook reads"
    return "a buffer" if label.startswith("buffer") else "a parameter" if label.startswith("net") else "a value"


def show(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value.reshape(-1)[:4], precision=6, separator=", ")
    return repr(value)


class Numbers:
    """The comparison of one program's two runs; ``bad`` is the first step at which torch's went wrong.

    Once torch has left a gradient local without a word and ours has not, the two differ in that gradient until they
    are the same again (set to None, or filled with zeros): it is ``corrected`` until then, and not compared. Nor is
    what is made of it: what a hook reads of such a net, and a norm over it, with what that norm scales.
    """

    def __init__(self, program: Program, theirs: Results, ours: Results, bad: int):
        self.program, self.bad = program, bad
        # With views .grad may be half reduced while hooks run, in torch too.
        self.hooks = "gradient_as_bucket_view" not in to_json(program)
        self.theirs = [_by_step(result, self.hooks) for result in theirs]
        self.ours = [_by_step(result, self.hooks) for result in ours]
        self.end = min(bad, *(result["at"] for result in ours))
        self.tolerance, self.rounding = tolerance_of(program), _rounding(program)
        self.corrected: set[str] = set()

    def difference(self) -> Difference | None:
        for step in range(-1, self.end):
            for rank in range(len(self.ours)):
                found = self._of_rank(step, rank)
                if found is not None:
                    return found
            self._same_again(step)
        return None

    def _of_rank(self, step: int, rank: int) -> Difference | None:
        expected, got = self.theirs[rank].get(step, []), self.ours[rank].get(step, [])
        if len(expected) != len(got):
            detail = f"step {step}, rank {rank}: {len(expected)} observations with torch, {len(got)} with ours"
            return Difference("numbers", step, "how often hooks run", detail)
        for (label, their), (other, our) in zip(expected, got):
            if label == other:
                if same(their, our, _amplified(self.program, label, self.tolerance)) or self._excused(step, label):
                    continue
                if self._is_compressed_and_not(label) and same(their, our, self.rounding):
                    self.tolerance = self.rounding
                    continue
                if their is None and our is not None and not np.any(our) and self._may_be_of_nothing(step, label):
                    self.corrected.add(label)
                    continue
            if not self.hooks and self._about_to_go_wrong(step):
                continue  # views of a reduction that nobody waits for
            detail = f"step {step}, rank {rank}, {label}: torch {show(their)}, ours {other} {show(our)}"
            return Difference("numbers", step, self._what(step, label), detail)
        return None

    def _may_be_of_nothing(self, step: int, label: str) -> bool:
        """Whether a gradient may be the mean of what no rank has: used under no_sync before, and by none in this
        backward; or frozen between forward and a backward that torch's class leaves local."""
        if self._of_corrected(label):
            return True
        everyone = [value for _, value in self._values(self.ours, step, label)]
        return origins.frozen(self.program, step, label) and not any(
            value is None or np.any(value) for value in everyone
        )

    def _about_to_go_wrong(self, step: int) -> bool:
        steps = self.program["steps"]
        until = [verb for verb, _ in steps[max(step, 0) : self.bad]]
        return self.bad < len(steps) and not {"step", "join"} & {*until}

    def _excused(self, step: int, label: str) -> bool:
        """Whether torch's class has left this gradient local, or it is made of one that it has."""
        if label in self.corrected:
            return True
        verb, a = self.program["steps"][step] if step >= 0 else ("", {})
        if self.corrected:
            if label.startswith("hook"):
                placed = int(label.removeprefix("hook").split()[0])  # as step 3: "hook3 reads 0"
                return self._of_corrected(f"net{self.program['steps'][placed][1]['w']}.")
            if verb == "clip" and self._clips(a, label):
                self.corrected |= {label} - {"norm"}
                return True
        if (
            not label.endswith(".grad")
            or not label.startswith("net")
            or origins.asks_for_local(self.program, step, label)
        ):
            return False
        if self._is_mean(label, step, self.theirs, self.ours):
            self.corrected.add(label)
            return True
        return False

    def _is_compressed_and_not(self, label: str) -> bool:
        """Whether two wrappers share the parameter, and one of them has a hook that sends fewer bits: who is last?"""
        if not label.startswith("net") or len(holders(self.program, label)) == 1:
            return False
        return any(verb == "comm_hook" and a["hook"] in ("fp16", "bf16") for verb, a in self.program["steps"])

    def _clips(self, a: dict[str, Any], label: str) -> bool:
        """Whether this is the norm of, or is scaled by, a gradient that is corrected."""
        nets = kin(self.program, a["w"])
        clipped = label == "norm" or (label.endswith(".grad") and any(label.startswith(f"net{net}.") for net in nets))
        return clipped and any(self._of_corrected(f"net{net}.") for net in nets)

    def _of_corrected(self, label: str) -> bool:
        """Whether a gradient of the same net, or of one that shares a block with it, is corrected."""
        if not self.corrected or not label.startswith("net"):
            return False
        net, *others = (int(one.partition(".")[0].removeprefix("net")) for one in (label, *self.corrected))
        return not kin(self.program, net).isdisjoint(others)

    def _same_again(self, step: int) -> None:
        for label in list(self.corrected):
            pairs = list(zip(self._values(self.theirs, step, label), self._values(self.ours, step, label)))
            if all(found and same(their, our, self.rounding) for (found, their), (_, our) in pairs):
                self.corrected.discard(label)
                if not all(same(their, our, self.tolerance) for (_, their), (_, our) in pairs):
                    self.tolerance = self.rounding  # its terms were added in another order

    @staticmethod
    def _values(results: list[dict[int, list[tuple[str, Any]]]], step: int, label: str) -> list[tuple[bool, Any]]:
        """On each rank, whether the label was observed in a step, and its last value."""
        seen = [dict(result.get(step, [])) for result in results]
        return [(label in values, values.get(label)) for values in seen]

    def _is_mean(self, label: str, step: int, local: Any, mean: Any) -> bool:
        """One class's ranks disagree on a gradient without a word, and the other's agree on the mean of theirs."""
        found = []
        for results in (local, mean):
            values = [value for _, value in self._values(results, step, label)]
            known = [value for value in values if value is not None]
            if not known:
                return False
            found.append([np.zeros_like(known[0]) if value is None else value for value in values])
        terms, means = found
        disagree = any(not np.array_equal(terms[0], other) for other in terms[1:])
        agree = all(np.array_equal(means[0], other) for other in means[1:])
        divisors = (len(terms), 1) if may_be_divided(self.program, label) else (len(terms),)
        return disagree and agree and any(np.allclose(sum(terms) / by, means[0], *self.rounding) for by in divisors)

    def _is_local_divided(self, label: str, step: int) -> bool:
        """On every rank torch's gradient is ours divided by the number of ranks, and the ranks disagree: it is in a
        bucket that never left."""
        theirs = [value for _, value in self._values(self.theirs, step, label)]
        ours = [value for _, value in self._values(self.ours, step, label)]
        for their, our in zip(theirs, ours):
            if (their is None) != (our is None):
                return False
            if our is not None and not np.allclose(their * len(ours), our, *self.rounding):
                return False
        first, *others = theirs
        return any((first is None) != (other is None) or not np.array_equal(first, other) for other in others)

    def _what(self, step: int, label: str) -> str:
        what = _kind_of(label)
        if what != "a gradient":
            return what
        if origins.other_forward_waits(self.program, step, label) and self._is_mean(
            label, step, self.ours, self.theirs
        ):
            return "a gradient under no_sync, while another wrapper's forward waits"
        if origins.ended_by_a_hook(self.program, step, label) and self._is_mean(label, step, self.ours, self.theirs):
            return "a gradient of a backward that a hook ended, averaged"
        if may_be_divided(self.program, label) and self._is_local_divided(label, step):
            return "a gradient that was divided and never sent"
        if origins.left_by_join(self.program, step) and self._is_mean(label, step, self.ours, self.theirs):
            before = [self._values(self.ours, at, label) for at in (step - 1, step)]
            if all(same(old, new, (0.0, 0.0)) for (_, old), (_, new) in zip(*before)):
                return "a gradient that join left and nobody uses, averaged"
        return what
