"""The command line: ``python -m tests.conformance --impl torch|minddp``; see the package's text.

Ends with 0 when every test that passes with torch's class passes, or is listed in ``exceptions.toml``
(and still fails).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.conformance import cases, zygote
from tests.conformance.cases import Case
from tests.forked import Server
from tests.ranks_pool import Process

Answer = dict[str, Any]


class Tests:
    """A module's tests in worlds of one size, with ``impl``'s class: each in a process of its own."""

    def __init__(self, impl: str, module: str, world_size: int):
        self._variables = zygote.environment(impl, module, world_size)
        self._server = Server("tests.conformance.zygote", **self._variables)

    def _start(self, name: str | None, room: Path) -> Process:
        return self._server.start(zygote.answer, (name, room, self._variables))

    def names(self) -> list[str]:
        return list(zygote.run_case(self._start, None, None)["names"])

    def run(self, case: Case) -> Answer:
        return zygote.run_case(self._start, case.name, case.timeout)

    def __enter__(self) -> Tests:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


Report = Callable[[Case, Answer], None]


def _work(impl: str, waiting: queue.SimpleQueue[Case], report: Report) -> None:
    """One job: takes cases while there are any; keeps a server for as long as it fits the case."""
    with ExitStack() as stack:
        fits = None
        while not waiting.empty():
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            if fits != (case.module, case.world_size):
                stack.close()
                fits = (case.module, case.world_size)
                tests = stack.enter_context(Tests(impl, *fits))
            report(case, tests.run(case))


def run_cases(impl: str, chosen: Iterable[Case], jobs: int, report: Report) -> dict[str, Answer]:
    """Runs the cases on ``jobs`` threads; test -> answer."""
    answers: dict[str, Answer] = {}
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in sorted(chosen, key=lambda case: (case.module, case.world_size, -case.seconds)):
        waiting.put(case)
    lock = threading.Lock()

    def note(case: Case, answer: Answer) -> None:
        with lock:
            answers[case.test] = {**answer, "world_size": case.world_size}
            report(case, answer)

    threads = [threading.Thread(target=_work, args=(impl, waiting, note)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def discover(pattern: str, jobs: int, report: Report) -> dict[str, Answer]:
    """Runs every test of the wheel's modules with torch's class, in growing worlds until it passes."""
    answers: dict[str, Answer] = {}
    for key, module in cases.MODULES.items():
        with Tests("torch", key, module.world_sizes[0]) as tests:
            names = [name for name in tests.names() if re.search(pattern, name)]
        for world_size in module.world_sizes:
            chosen = [Case(key, name, world_size) for name in names]
            answers.update(run_cases("torch", chosen, jobs, report))
            names = [case.name for case in chosen if answers[case.test]["outcome"] != "passed"]
    return answers


def passing_cases(answers: dict[str, Answer]) -> Iterable[Case]:
    """The cases for ``torch_passes.txt``: those that construct the class, and pass."""
    for test, answer in answers.items():
        if answer["outcome"] == "passed" and answer["constructed"]:
            owner, _, name = test.rpartition(".")
            yield Case(owner, name, answer["world_size"], answer["seconds"])


def judge(
    answers: dict[str, Answer],
    exceptions: dict[str, str],
    source: str = "exceptions.toml",
    constructs: bool = True,
) -> list[str]:
    """What makes the run fail, one line each.

    Args:
        answers: test -> answer.
        exceptions: what must fail -> why.
        source: the file with the exceptions.
        constructs: whether a test that passes without the class shows nothing.
    """
    wrong = []
    for test, answer in sorted(answers.items()):
        if answer["outcome"] != "passed":
            if test not in exceptions:
                wrong.append(", ".join(filter(None, [f"{test}: {answer['outcome']}", headline(answer)])))
        elif constructs and not answer["constructed"]:
            wrong.append(f"{test}: passed without constructing the class")
        elif test in exceptions:
            wrong.append(f"{test}: passes, yet {source} lists it")
    return wrong


def reporting(write: Callable[[str], None]) -> Report:
    """A line for each answer, counted."""
    counter = itertools.count(1)

    def report(case: Case, answer: Answer) -> None:
        place = f"{next(counter):3} {answer['outcome']:7} {answer['seconds']:6.1f} s"
        write(f"{place}  {case.test}, {case.world_size} ranks {headline(answer)}")

    return report


def totals(answers: dict[str, Answer]) -> str:
    count = Counter(answer["outcome"] for answer in answers.values())
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


def headline(answer: Answer) -> str:
    """The line of a message that says most: the last that names an exception, else the last."""
    lines = answer.get("message", "").strip().splitlines() or [""]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])[:200]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--impl", choices=("torch", "minddp"), default="minddp", help="whose class runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time")
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests that match this expression")
    parser.add_argument("--json", type=Path, help="writes every test's answer to this file")
    parser.add_argument(
        "--discover",
        action="store_true",
        help="runs all tests with torch's class and writes this torch's list of those that pass anew",
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    report = reporting(lambda line: print(line, flush=True))
    began = time.monotonic()
    exceptions = cases.read_exceptions() if args.impl == "minddp" else {}
    if args.discover:
        answers = discover(args.k, args.jobs, report)
    else:
        chosen = [case for case in cases.read_passes() if re.search(args.k, case.test)]
        answers = run_cases(args.impl, chosen, args.jobs, report)
    if args.json:
        args.json.write_text(json.dumps(answers, indent=1, sort_keys=True))
    print(f"{totals(answers)} with {args.impl}'s class, in {time.monotonic() - began:.0f} s")
    if args.discover:
        if not args.k:
            cases.write_passes(passing_cases(answers), versions())
        return 0
    wrong = judge(answers, exceptions)
    for line in wrong:
        print(line)
    return 1 if wrong or not answers else 0


def versions() -> str:
    from importlib.metadata import version

    return f"torch {version('torch')}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
