"""PyTorch's own process-group tests, with the shared-memory transport in Gloo's place: ``make conformance-shm``.

Of the wheel's ``distributed_test``, every test that passes with Gloo and constructs no DistributedDataParallel, in
the smallest world in which it does. Ends with 0 when all of them pass, or are listed in
``transport_exceptions.toml`` (and still fail).
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import cases
from tests.conformance.__main__ import Answer, Zygote, headline, run_cases
from tests.conformance.cases import Case

MODULE = "distributed_test"
EXCEPTIONS = Path(__file__).with_name("transport_exceptions.toml")


def judge(answers: dict[str, Answer], exceptions: dict[str, str]) -> list[str]:
    """What makes the run fail, one line each."""
    wrong = []
    for test, answer in sorted(answers.items()):
        passed = answer["outcome"] == "passed"
        if passed and test in exceptions:
            wrong.append(f"{test}: passes, yet {EXCEPTIONS.name} lists it")
        elif not passed and test not in exceptions:
            wrong.append(f"{test}: {answer['outcome']}, {headline(answer)}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.transport", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time")
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests that match this expression")
    options = parser.parse_args(arguments)
    counter = itertools.count(1)

    def report(case: Case, answer: Answer) -> None:
        place = f"{next(counter):3} {answer['outcome']:7} {answer['seconds']:6.1f} s"
        print(f"{place}  {case.test}, {case.world_size} ranks {headline(answer)}", flush=True)

    worlds = cases.MODULES[MODULE].world_sizes
    with Zygote("torch", MODULE, worlds[0]) as zygote:
        names = [name for name in zygote.names() if re.search(options.k, name)]
    answers: dict[str, Answer] = {}
    for world_size in worlds:
        tried = run_cases("torch", [Case(MODULE, name, world_size) for name in names], options.jobs, lambda *_: None)
        passed = {test for test, answer in tried.items() if answer["outcome"] == "passed"}
        chosen = [
            case
            for name in names
            if (case := Case(MODULE, name, world_size)).test in passed and not tried[case.test]["constructed"]
        ]
        answers.update(run_cases("shm", chosen, options.jobs, report))
        names = [name for name in names if Case(MODULE, name, world_size).test not in passed]
    wrong = judge(answers, tomllib.loads(EXCEPTIONS.read_text()))
    good = sum(answer["outcome"] == "passed" for answer in answers.values())
    print(f"{good} of {len(answers)} tests that pass with Gloo pass with shared memory; {len(answers) - good} do not")
    for line in wrong:
        print(line)
    return 1 if wrong or not answers else 0


if __name__ == "__main__":
    sys.exit(main())
