"""Hypothesis draws programs, which both classes run, and shrinks those that show an unexplained difference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky

from .compare import judge, meant, unsteady, waited
from .numbers import Difference, has_low_precision
from .program import Program, listing, to_json
from .ranks import Ranks
from .strategies import programs

__all__ = ["Finding", "Hunt", "Pair"]


def _may_race(program: Program) -> bool:
    """Whether torch's own numbers may differ from run to run.

    Seen: two reducers on one parameter where one has views, and sparse gradients, which are replaced or divided in
    place while another backward adds to them.
    """
    text = to_json(program)
    return '"sparse":true' in text or ("gradient_as_bucket_view" in text and ('"same"' in text or "rewrap" in text))


class Pair:
    """Two classes on the same processes: :meth:`difference` runs one program with both and gives the verdict."""

    def __init__(self, world: int, candidate: str = "minddp", patience: float = 1):
        self.ranks = Ranks(world, patience)
        self.candidate = candidate

    def run(self, program: Program) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self.ranks.run(program, "torch"), self.ranks.run(program, self.candidate)

    def difference(self, program: Program) -> Difference | None:
        theirs, ours = self.run(program)
        found = judge(program, theirs, ours, lambda: self.ranks.run(program, "torch", apart=True))
        if found is not None and found.kind == "numbers":
            found = self._without_rounding(program, found)
        if found is None or found.kind != "numbers":
            return found
        again = range(6 if _may_race(program) else 2)
        return None if any(unsteady(program, theirs, self.ranks.run(program, "torch")) for _ in again) else found

    def _without_rounding(self, program: Program, found: Difference) -> Difference | None:
        """What is left of a difference where both agree on the numbers in double precision, to its precision."""
        if program["world"] == 2 or "dtype" in program:
            return found  # two ranks add alike: their numbers are the same bits
        precise = {**program, "dtype": "float64", "nets": [_precise(net) for net in program["nets"]]}
        return found if has_low_precision(precise) else judge(precise, *self.run(precise))


def _precise(net: dict[str, Any]) -> dict[str, Any]:
    blocks = [{**block, "kind": "double"} if block["kind"] == "half" else block for block in net["blocks"]]
    return {**net, "blocks": blocks}


class Unexplained(AssertionError):
    """What hypothesis is to shrink."""


@dataclass
class Finding:
    """The smallest program with a difference. ``steady``: whether another run of it showed the same one."""

    program: Program
    difference: Difference
    steady: bool = True

    def text(self) -> str:
        again = "" if self.steady else "  (not every time)"
        return f"--- {self.difference.signature}{again}\n{self.difference.detail}\n{listing(self.program)}\n"


@dataclass
class Hunt:
    """``findings`` has one of each class of unexplained difference; ``again`` counts the others that were drawn.

    ``meant`` counts the explained differences by the id of their entry.
    """

    seed: int
    programs: int
    worlds: tuple[int, ...] = (2,)
    candidate: str = "minddp"
    shrink_seconds: float = 60.0  # for each class
    findings: dict[str, Finding] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    meant: Counter[str] = field(default_factory=Counter)
    done: int = 0

    def run(self) -> Iterator[Finding]:
        """Yields what is found, shrunk, while it goes on until all programs were drawn."""
        self._pairs = {world: Pair(world, self.candidate) for world in self.worlds}
        try:
            while self.done < self.programs:
                finding = self._next()
                if finding is not None:
                    self.findings[finding.difference.signature] = finding
                    yield finding
        finally:
            for pair in self._pairs.values():
                pair.ranks.close()

    def report(self) -> str:
        return "\n".join(finding.text() for finding in self.findings.values())

    def _next(self) -> Finding | None:
        """The next class of difference, or None where there is none in the programs that are left."""
        smallest: Finding | None = None
        until = 0.0
        verdicts: dict[str, Difference | None] = {}

        @seed(f"{self.seed}/{self.done}")
        @settings(
            max_examples=self.programs - self.done, database=None, deadline=None, report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], verbosity=Verbosity.quiet,
        )  # fmt: skip
        @given(programs(self.worlds))
        def same(program: Program) -> None:
            nonlocal smallest, until
            text = to_json(program)
            if text not in verdicts:
                if smallest is not None and time.monotonic() > until:
                    return  # all that is still to be tried counts as the same, so that shrinking ends
                verdicts[text] = self._verdict(program, counts=smallest is None)
            difference = verdicts[text]
            if difference is None or (smallest and smallest.difference.signature != difference.signature):
                return
            until = until or time.monotonic() + self.shrink_seconds
            smallest = Finding(program, difference)
            raise Unexplained(difference.signature)

        try:
            same()
        except (Unexplained, Flaky):
            assert smallest is not None
            seen = self._pairs[smallest.program["world"]].difference(smallest.program)
            smallest.steady = seen is not None and seen.signature == smallest.difference.signature
        return smallest

    def _verdict(self, program: Program, counts: bool) -> Difference | None:
        """What is neither explained nor found before. Only what was drawn ``counts``, not what shrinking tries."""
        difference = self._pairs[program["world"]].difference(program)
        if counts and difference is not None and waited(difference) and meant(program, difference) is None:
            difference = self._without_hurry(program)
        self.done += counts
        if difference is None:
            return None
        reason = meant(program, difference)
        if reason is not None:
            self.meant[reason] += counts
        elif difference.signature in self.findings:
            self.again[difference.signature] += counts
        else:
            return difference
        return None

    def _without_hurry(self, program: Program) -> Difference | None:
        """The verdict where groups wait long: on a busy machine a rank may come late."""
        patient = Pair(program["world"], self.candidate, patience=15)
        try:
            return patient.difference(program)
        finally:
            patient.ranks.close()
