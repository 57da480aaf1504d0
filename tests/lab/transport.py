"""PyTorch's own process-group tests, with the shared-memory transport in Gloo's place.

Of the wheel's ``distributed_test``, every test that passes with Gloo and constructs no DistributedDataParallel, in
the smallest world in which it does. Ends with 0 when all of them pass, or are listed in
``transport_exceptions.toml`` (and still fail).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import cases
from tests.conformance.__main__ import Answer, Tests, judge, reporting, run_cases
from tests.conformance.cases import Case

MODULE = "distributed_test"
EXCEPTIONS = Path(__file__).with_name("transport_exceptions.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conformance-shm", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time")
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests that match this expression")
    options = parser.parse_args(arguments)
    report = reporting(lambda line: print(line, flush=True))
    worlds = cases.MODULES[MODULE].world_sizes
    with Tests("torch", MODULE, worlds[0]) as tests:
        names = [name for name in tests.names() if re.search(options.k, name)]
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
    wrong = judge(answers, tomllib.loads(EXCEPTIONS.read_text()), EXCEPTIONS.name, constructs=False)
    good = sum(answer["outcome"] == "passed" for answer in answers.values())
    print(f"{good} of {len(answers)} tests that pass with Gloo pass with shared memory; {len(answers) - good} do not")
    for line in wrong:
        print(line)
    return 1 if wrong or not answers else 0


if __name__ == "__main__":
    sys.exit(main())
