"""Drawn programs train the same with ours as with torch's class; and the fuzzer finds planted faults.

``MINDDP_PROGRAMS`` sets how many programs are drawn (default 300), ``MINDDP_SEED`` from what.
"""

import json
import os
import threading

import pytest
from hypothesis import HealthCheck, given, settings

from .compare import _entries
from .hunt import Hunt, Pair
from .numbers import Difference
from .program import VERBS, listing, to_json
from .ranks import RUN_SECONDS
from .shrink import shrink
from .strategies import SCENES, nth_program, programs

PROGRAMS = int(os.environ.get("MINDDP_PROGRAMS", "300"))
PARTS = 4
SEED = int(os.environ.get("MINDDP_SEED", "10"))


@pytest.mark.long
@pytest.mark.timeout(300 + PROGRAMS)
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs_train_the_same(part):
    """Each of pytest's workers takes parts."""
    drawn = range(part, PROGRAMS, PARTS)
    hunt = Hunt(SEED, drawn, worlds=(2, 3) if part == 0 else (2,), shrink_seconds=15).run()
    assert not hunt.findings, f"{hunt.counts()}\n{hunt.report()}"
    assert hunt.done == len(drawn)


@pytest.mark.all
@pytest.mark.timeout(120)
def test_torch_against_itself_shows_nothing():
    hunt = Hunt(1, range(30), worlds=(2, 3), candidate="torch").run()
    assert not hunt.findings, hunt.report()


PLANTED = {
    "ScalesOne": "numbers",
    "ForgetsNoSync": "numbers",
    "RaisesLate": "hangs",
    "Stale": "left over|numbers|dies|hangs",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    enough = 1 if PLANTED[name] == "hangs" else 3  # for which each class waits some seconds
    hunt = Hunt(
        2, range(40), candidate=f"tests.lab.fuzz.planted:{name}", shrink_seconds=0, seconds=60, enough=enough
    ).run()
    kinds = {signature.partition(":")[0] for signature in hunt.findings}
    assert kinds & set(PLANTED[name].split("|")), hunt.counts()


@pytest.mark.timeout(120)
def test_a_rank_that_never_returns_is_ended_and_the_next_program_runs():
    program = nth_program(0, 0)
    program["nets"], program["wrappers"] = [{"blocks": [{"kind": "linear"}]}], [{"net": 0}]
    program["optimizers"] = [{"kind": "sgd", "of": [0]}]
    program["steps"] = [["forward", {"out": "a"}], ["forward", {"out": "b"}]]
    pair = Pair(2, "torch", "tests.lab.fuzz.planted:WaitsForever", seconds=3)
    assert pair.difference(program).kind == "hangs"
    pair.candidate, pair.ranks.seconds = "torch", RUN_SECONDS
    assert pair.difference(program) is None
    pair.close()


class _Late:
    """Stands for a :class:`Pair`: differs in the first of the runs, or in all of them."""

    def __init__(self, words, times):
        self.words, self.times = words, times

    def difference(self, program):
        self.times -= 1
        return Difference("raises", 0, self.words, self.words) if self.times >= 0 else None


@pytest.mark.parametrize(
    "words, times, kept",
    [("rank 1 has had no such backward for 2 s", 1, 0), ("has shown none for 2 s", 9, 1), ("another", 1, 1)],
)
def test_a_rank_that_came_late_once_is_no_finding(words, times, kept):
    hunt = Hunt(0, [0], shrink_seconds=0)
    hunt._lock = threading.Lock()
    hunt._one(0, nth_program(0, 0), _Late(words, times))
    assert len(hunt.findings) == kept


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_a_program_is_plain_data_and_has_a_listing(program):
    assert json.loads(to_json(program)) == program
    assert len(listing(program).splitlines()) > len(program["steps"])
    assert {verb for verb, _ in program["steps"]} <= set(VERBS)


def test_every_verb_is_drawn():
    drawn = {step[0] for index in range(1500) for step in nth_program(0, index)["steps"]}
    assert drawn == set(VERBS)
    assert set(SCENES) > {"gan", "attack", "saliency", "jacobian", "penalty"}


def test_shrinking_keeps_what_shows():
    program = next(p for p in (nth_program(3, i) for i in range(100)) if any(s[0] == "clip" for s in p["steps"]))
    smallest = shrink(program, lambda p: any(step[0] == "clip" for step in p["steps"]))
    assert [step[0] for step in smallest["steps"]] == ["clip"]
    assert len(smallest["wrappers"]) == 1


def test_every_meant_difference_has_a_reason():
    ids = [entry["id"] for entry in _entries()]
    assert len(ids) == len(set(ids))
