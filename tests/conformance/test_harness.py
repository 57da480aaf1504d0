"""The harness itself: what hangs or dies fails alone, leaves no process, and is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import cases
from tests.conformance.__main__ import headline, judge, passing_cases, totals
from tests.conformance.cases import Case

ROOT = Path(__file__).parents[2]
NAMES = ["test_passes", "test_dies", "test_exits", "test_fails", "test_hangs", "test_skips", "test_passes"]
SERVE = """
from tests.conformance import zygote
from tests.conformance.sample_cases import Sample
zygote.adopt_orphans()
zygote.serve(Sample)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every sample run in turn by one zygote; the last answer is the children's process ids."""
    pids = tmp_path_factory.mktemp("pids") / "pids"
    requests = "".join(json.dumps({"name": name, "timeout": 2}) + "\n" for name in NAMES)
    served = subprocess.run(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        env={**os.environ, "SAMPLE_PIDS": str(pids)},
        input=requests,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [json.loads(line) for line in served.stdout.splitlines()]
    return [*found, {"pids": list(map(int, pids.read_text().split()))}]


def test_every_case_is_answered_for_itself(answers: list[dict[str, Any]]) -> None:
    outcomes = [answer["outcome"] for answer in answers[:-1]]
    assert outcomes == ["passed", "failed", "failed", "failed", "failed", "skipped", "passed"]
    messages = [answer["message"] for answer in answers[:-1]]
    assert messages[1] == "the case process died"
    assert "SystemExit" in messages[2]
    assert "AssertionError" in messages[3]
    assert messages[4] == "did not end within 2 s"
    assert messages[5] == "no such thing here"
    assert "what it printed" in answers[3]["output"]


def test_no_child_of_a_case_outlives_it(answers: list[dict[str, Any]]) -> None:
    pids = answers[-1]["pids"]
    assert len(pids) == len(NAMES)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_failure_counts_unless_listed_and_a_listed_pass_counts() -> None:
    passed = {"outcome": "passed", "constructed": True, "seconds": 1.0, "world_size": 2}
    failed = {**passed, "outcome": "failed"}
    found = {"a.test_1": passed, "a.test_2": failed, "a.test_3": failed, "a.test_4": passed}
    assert judge(found, {"a.test_2": "because", "a.test_4": "once"}) == [
        "a.test_3: failed",
        "a.test_4: passes, yet exceptions.toml lists it",
    ]
    assert totals(found) == "2 passed, 2 failed, 0 skipped"
    assert judge({"a.test_1": {**passed, "constructed": False}}, {}) == [
        "a.test_1: passed without constructing the class"
    ]
    assert [case.test for case in passing_cases({"distributed_test.test_1": passed, "b.test_2": failed})] == [
        "distributed_test.test_1"
    ]


def test_headline_is_the_exception_not_what_follows_it() -> None:
    message = "Traceback:\n  File\nValueError: no\n\nTo run this again:\n  python x\n"
    assert headline({"message": message}) == "ValueError: no"
    assert headline({"message": ""}) == ""


def test_thirds_share_the_tests_and_the_time_out() -> None:
    listed = [Case("m", f"test_{number}", 2, float(number)) for number in range(1, 31)]
    parts = [cases.third(listed, which) for which in (1, 2, 3)]
    assert sorted(case.test for part in parts for case in part) == sorted(case.test for case in listed)
    times = [sum(case.seconds for case in part) for part in parts]
    assert max(times) - min(times) <= 1


def test_lists_agree() -> None:
    listed = cases.read_passes()
    names = [case.test for case in listed]
    assert len(set(names)) == len(names) >= 80
    for test, reason in cases.read_exceptions().items():
        assert test in names, "an exception must be a test that passes with torch's class"
        assert len(reason) > 20, "an exception needs its reason"


def test_the_transports_run_fails_for_what_is_not_listed_and_for_what_need_not_be() -> None:
    answers = {
        name: {"outcome": outcome, "message": "ValueError: no"}
        for name, outcome in {"good": "passed", "listed": "failed", "new": "failed", "mended": "passed"}.items()
    }
    wrong = judge(answers, {"listed": "", "mended": ""}, "transport_exceptions.toml", constructs=False)
    assert [line.partition(":")[0] for line in wrong] == ["mended", "new"]
    assert "ValueError: no" in wrong[1]
