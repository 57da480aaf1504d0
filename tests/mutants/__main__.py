"""``python -m tests.mutants``: plants every fault of the list in a copy, one at a time; fails where one survives."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .catalog import Mutant, follow, load, problems
from .workshop import Outcome, Workshop


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every mutant that ran was caught."""
    options = _parser().parse_args(arguments)
    if options.follow:
        print(*follow(), sep="\n")
    mutants = load()
    if wrong := problems(mutants):
        print("mutants.toml does not fit the sources:", *wrong, sep="\n  ")
        return 2
    chosen = _chosen(mutants, options)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id:45} {mutant.fault}")
        return 0
    if options.folder is not None:
        return _run(chosen, Workshop(options.folder.resolve(), options.timeout), options.baseline)
    with tempfile.TemporaryDirectory(prefix="minddp-mutants-") as folder:
        return _run(chosen, Workshop(Path(folder), options.timeout), options.baseline)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants alone; a prefix of ids will do")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--python-only", action="store_true", help="those that need no build")
    group.add_argument("--cpp-only", action="store_true", help="those of csrc")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N of what is chosen")
    parser.add_argument("--list", action="store_true", help="show what is chosen, and end")
    parser.add_argument(
        "--follow", action="store_true", help="first write into the list which place each text stands in now"
    )
    parser.add_argument("--folder", type=Path, help="keep the copy and its build here for the next time")
    parser.add_argument("--timeout", type=int, default=90, metavar="SECONDS", help="for one test; longer is a hang")
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a fault: all must pass")
    return parser


def _chosen(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Mutant]:
    unwanted = {True} if options.python_only else {False} if options.cpp_only else set()
    chosen = [m for m in mutants if m.is_cpp not in unwanted]
    if options.only:
        unknown = [name for name in options.only if not any(m.id.startswith(name) for m in mutants)]
        if unknown:
            raise SystemExit(f"no such mutant: {', '.join(unknown)}")
        chosen = [m for m in chosen if any(m.id.startswith(name) for name in options.only)]
    return chosen[: options.limit]


def _run(mutants: Sequence[Mutant], workshop: Workshop, baseline: bool) -> int:
    if baseline:
        verdict, by = workshop.run_tests(sorted({test for mutant in mutants for test in mutant.tests}))
        if verdict != "SURVIVED":
            print(f"without a fault: {by}")
            return 2
    outcomes: dict[str, Outcome] = {}

    def tell(mutant: Mutant, outcome: Outcome) -> None:
        outcomes[mutant.id] = outcome
        print(f"{mutant.id:45} {outcome.verdict:9} {outcome.seconds:5.0f} s  {outcome.by}", flush=True)

    workshop.try_all(mutants, tell)
    verdicts = [outcome.verdict for outcome in outcomes.values()]
    caught, survived, errors = (verdicts.count(verdict) for verdict in ("caught", "SURVIVED", "ERROR"))
    print(f"\n{len(outcomes)} mutants: {caught} caught, {survived} survived, {errors} in error")
    for mutant in mutants:
        if (outcome := outcomes[mutant.id]).verdict != "caught":
            print(f"  {outcome.verdict} {mutant.id}: {mutant.fault} ({mutant.at}) {outcome.by}")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
