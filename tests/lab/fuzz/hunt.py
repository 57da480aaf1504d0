"""Draws, runs, judges and shrinks many programs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .compare import judge, meant
from .numbers import Difference, has_low_precision
from .program import listing, to_json
from .ranks import RUN_SECONDS, RankProcesses
from .shrink import shrink
from .strategies import nth_program

__all__ = ["Finding", "Hunt", "Pair"]


# The guard of gradients past a wrapper waits two seconds here: a busy machine's rank may come later, once.
_TOO_LATE = re.compile("has had no such backward for|has shown none for")


def _may_race(program: dict[str, Any]) -> bool:
    """Whether torch's own numbers may differ from run to run.

    Seen: two reducers on one parameter where one has views, and sparse gradients, which are replaced or divided in
    place while another backward adds to them.
    """
    text = to_json(program)
    return '"sparse":true' in text or ("gradient_as_bucket_view" in text and ('"same"' in text or "rewrap" in text))


class Pair:
    """Two classes on the same processes: :meth:`difference` runs one program with both and gives the verdict."""

    def __init__(self, world: int, reference: str = "torch", candidate: str = "minddp", seconds: float = RUN_SECONDS):
        self.ranks = RankProcesses(world, seconds)
        self.reference, self.candidate = reference, candidate

    def run(self, program: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self._run(program, self.reference), self._run(program, self.candidate)

    def _run(self, program: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """Again where a new process group did not come about in time, which a busy machine does."""
        for _ in range(3):
            results = self.ranks.run(program, name)
            if not any("DistStoreError: wait timeout" in result["error"] for result in results):
                break
        return results

    def difference(self, program: dict[str, Any]) -> Difference | None:
        theirs, ours = self.run(program)
        better = self.candidate != self.reference
        found = judge(program, theirs, ours, lambda: self.ranks.run(program, self.reference, True), better)
        if found is not None and found.kind == "numbers":
            found = self._without_rounding(program, found)
        if found is None or found.kind not in ("numbers", "diverges"):
            return found
        if not better:
            return None if _may_race(program) else found
        for _ in range(6 if _may_race(program) else 2):
            if judge(program, theirs, self.ranks.run(program, self.reference), better=False) is not None:
                return None if found.kind == "numbers" else found
        return found

    def _without_rounding(self, program: dict[str, Any], found: Difference) -> Difference | None:
        """What is left of a difference where both agree on the numbers in double precision, to its precision."""
        if program["world"] == 2 or "dtype" in program:
            return found  # two ranks add alike: their numbers are the same bits
        precise = {**program, "dtype": "float64", "nets": [_precise(net) for net in program["nets"]]}
        if has_low_precision(precise):
            return found
        return judge(precise, *self.run(precise))

    def close(self) -> None:
        self.ranks.close()


def _precise(net: dict[str, Any]) -> dict[str, Any]:
    blocks = [{**block, "kind": "double"} if block["kind"] == "half" else block for block in net["blocks"]]
    return {**net, "blocks": blocks}


@dataclass
class Finding:
    """``also``: the programs of the same class that were not kept."""

    index: int
    program: dict[str, Any]
    difference: Difference
    also: list[int] = field(default_factory=list)
    steady: bool = True

    def text(self) -> str:
        again = "" if self.steady else "  (not every time)"
        return (
            f"--- {self.difference.signature}{again}\n"
            f"program {self.index}; shrunk:\n\n{listing(self.program)}\n\n"
            f"  {self.difference.detail}\n\n{to_json(self.program)}\n"
        )


@dataclass
class Hunt:
    """``findings`` by signature; the first of each also names those that were not kept.

    ``meant`` counts the explained differences by the id of their entry.
    """

    seed: int
    programs: Iterable[int]  # by index
    worlds: tuple[int, ...] = (2,)
    reference: str = "torch"
    candidate: str = "minddp"
    jobs: int = 1
    shrink_seconds: float = 60.0
    seconds: float = float("inf")  # no program is begun later than this
    examples: int = 1  # how many of each class of difference are shrunk and kept
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    meant: dict[str, int] = field(default_factory=dict)
    done: int = 0
    enough: float = float("inf")  # no program is begun after so many differences
    on_finding: Callable[[Finding], None] = lambda finding: None
    on_progress: Callable[[Hunt], None] = lambda hunt: None

    def run(self) -> Hunt:
        self._lock = threading.Lock()
        self._waiting = iter(self.programs)
        self._end = time.monotonic() + self.seconds
        self._errors: list[BaseException] = []
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self

    def counts(self) -> dict[str, int]:
        """How often each class of unexplained difference was seen."""
        return {signature: len(indices) for signature, indices in self.indices().items()}

    def indices(self) -> dict[str, list[int]]:
        """The programs with each class of unexplained difference."""
        return {
            signature: sorted(index for finding in found for index in (finding.index, *finding.also))
            for signature, found in self.findings.items()
        }

    def report(self) -> str:
        return "\n".join(finding.text() for found in self.findings.values() for finding in found)

    def _work(self) -> None:
        pairs = {world: Pair(world, self.reference, self.candidate) for world in self.worlds}
        try:
            while (index := self._take()) is not None:
                program = nth_program(self.seed, index, self.worlds)
                self._one(index, program, pairs[program["world"]])
                with self._lock:
                    self.done += 1
                    self.on_progress(self)
        except BaseException as error:
            self._errors.append(error)
        finally:
            for pair in pairs.values():
                pair.close()

    def _take(self) -> int | None:
        with self._lock:
            if time.monotonic() > self._end or sum(self.counts().values()) >= self.enough:
                return None
            return next(self._waiting, None)

    def _one(self, index: int, program: dict[str, Any], pair: Pair) -> None:
        difference = pair.difference(program)
        if difference is None:
            return
        reason = meant(program, difference)
        signature = difference.signature
        with self._lock:
            if reason is not None:
                self.meant[reason] = self.meant.get(reason, 0) + 1
                return
            kept = self.findings.setdefault(signature, [])
            if len(kept) >= self.examples:
                kept[0].also.append(index)
                return
            finding = Finding(index, program, difference)
            kept.append(finding)
        self._shrink(finding, pair)
        if not finding.steady and _TOO_LATE.search(finding.difference.detail):
            with self._lock:
                kept.remove(finding)
                if not kept:
                    del self.findings[signature]
            return
        self.on_finding(finding)

    def _shrink(self, finding: Finding, pair: Pair) -> None:
        signature = finding.difference.signature

        def shows(program: dict[str, Any]) -> bool:
            difference = pair.difference(program)
            if difference is None or difference.signature != signature or meant(program, difference):
                return False
            finding.difference = difference
            return True

        finding.steady = shows(finding.program)
        if finding.steady and self.shrink_seconds:
            finding.program = shrink(finding.program, shows, self.shrink_seconds)
