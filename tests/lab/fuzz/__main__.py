"""``python -m tests.lab.fuzz --programs 20000 --seed 1 --ranks 2,3``: the fuzzer's command line.

Prints progress, and for each class of difference a shrunk program with what both classes did. ``--program FILE``
runs one program (JSON, as a report prints it). Ends with 1 if a difference is not explained by
``differences.toml``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import minddp  # noqa: F401  (where it does not load, say so here: of its ranks one would see that they die)

from .compare import meant
from .hunt import Finding, Hunt, Pair
from .program import listing
from .strategies import nth_program


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first program")
    parser.add_argument("--only", type=_indices, help="these programs alone: indices, with commas between")
    parser.add_argument("--ranks", default="2", help="numbers of ranks that take turns, such as 2,2,3")
    parser.add_argument("--jobs", type=int, default=2, help="how many programs run at a time")
    parser.add_argument("--reference", default="torch")
    parser.add_argument("--candidate", default="minddp", help="torch, minddp, or module:attribute")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for shrinking each class of difference")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop drawing after this long")
    parser.add_argument("--examples", type=int, default=1, help="how many of each class to shrink and show")
    parser.add_argument("--report", type=Path, help="a file for the differences, as they are found")
    parser.add_argument("--program", type=Path, help="run this one program (JSON)")
    parser.add_argument("--show", type=int, help="print the program of this index, and what it does")
    return parser.parse_args()


def _indices(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _one(arguments: argparse.Namespace, program: dict) -> int:
    pair = Pair(program["world"], arguments.reference, arguments.candidate)
    print(listing(program))
    for name, results in zip((arguments.reference, arguments.candidate), pair.run(program)):
        for rank, result in enumerate(results):
            print(f"{name}, rank {rank}: {result['end']} at step {result['at']} {result['error']}")
    difference = pair.difference(program)
    pair.close()
    print(f"{difference.signature}\n  {difference.detail}" if difference else "no difference")
    return int(difference is not None and meant(program, difference) is None)


def main() -> int:
    arguments = _arguments()
    worlds = tuple(int(word) for word in arguments.ranks.split(","))
    if arguments.program:
        return _one(arguments, json.loads(arguments.program.read_text()))
    if arguments.show is not None:
        return _one(arguments, nth_program(arguments.seed, arguments.show, worlds))
    start = last = time.monotonic()

    def found(finding: Finding) -> None:
        print(finding.text(), flush=True)
        if arguments.report:
            with arguments.report.open("a") as file:
                file.write(finding.text() + "\n")

    def progress(hunt: Hunt) -> None:
        nonlocal last
        if time.monotonic() - last > 15:
            last = time.monotonic()
            rate = 60 * hunt.done / (last - start)
            print(f"{hunt.done} programs, {rate:.0f} a minute, {len(hunt.findings)} classes", flush=True)

    programs = arguments.only or range(arguments.first, arguments.first + arguments.programs)
    hunt = Hunt(
        arguments.seed, programs, worlds, arguments.reference, arguments.candidate, arguments.jobs,
        arguments.shrink, arguments.seconds, arguments.examples,
        on_finding=found, on_progress=progress,
    ).run()  # fmt: skip
    taken = time.monotonic() - start
    unexplained = sum(hunt.counts().values())
    print(
        f"seed {arguments.seed}: {hunt.done} programs in {taken:.0f} s ({60 * hunt.done / taken:.0f} a minute); "
        f"{unexplained} unexplained differences of {len(hunt.findings)} classes; meant: {hunt.meant or 'none'}"
    )
    for signature, indices in sorted(hunt.indices().items(), key=lambda item: -len(item[1])):
        print(f"{len(indices):6}  {signature[:200]}\n        programs {','.join(map(str, indices))}")
    return int(bool(hunt.findings))


if __name__ == "__main__":
    sys.exit(main())
