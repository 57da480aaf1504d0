"""``python -m tests.lab.fuzz --programs 400 --seed 1 --ranks 2,2,3``: draws programs, and shrinks what differs.

Prints, for each class of difference, a shrunk program with what both classes did, and writes that program into a file
(JSON): ``--program FILE`` runs it again. Ends with 1 if a difference is not explained by ``differences.toml``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import minddp  # noqa: F401  (where it does not load, say so here: of its ranks one would see that they die)

from .compare import meant
from .hunt import Hunt, Pair
from .program import listing


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="2", help="numbers of ranks to draw from, such as 2,2,3")
    parser.add_argument("--candidate", default="minddp", help="torch, minddp, or module:attribute")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for shrinking each class of difference")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where shrunk programs are written")
    parser.add_argument("--program", type=Path, help="run this one program (JSON)")
    return parser.parse_args()


def _run_again(program: dict, candidate: str) -> int:
    pair = Pair(program["world"], candidate)
    print(listing(program))
    for name, results in zip(("torch", candidate), pair.run(program)):
        for rank, result in enumerate(results):
            print(f"{name}, rank {rank}: {result['end']} at step {result['at']} {result['error']}")
    difference = pair.difference(program)
    pair.ranks.close()
    print(f"{difference.signature}\n  {difference.detail}" if difference else "no difference")
    return int(difference is not None and meant(program, difference) is None)


def main() -> int:
    arguments = _arguments()
    if arguments.program:
        return _run_again(json.loads(arguments.program.read_text()), arguments.candidate)
    worlds = tuple(int(word) for word in arguments.ranks.split(","))
    hunt = Hunt(arguments.seed, arguments.programs, worlds, arguments.candidate, arguments.shrink)
    start = time.monotonic()
    for number, finding in enumerate(hunt.run()):
        arguments.folder.mkdir(parents=True, exist_ok=True)
        file = arguments.folder / f"{arguments.seed}-{number}.json"
        file.write_text(listing(finding.program))
        print(f"{finding.text()}after {hunt.done} programs; --program {file} runs it again\n", flush=True)
    taken = time.monotonic() - start
    print(
        f"seed {arguments.seed}: {hunt.done} programs in {taken:.0f} s ({60 * hunt.done / taken:.0f} a minute); "
        f"{len(hunt.findings)} classes of unexplained differences; meant: {dict(hunt.meant)}"
    )
    for signature in hunt.findings:
        print(f"{1 + hunt.again[signature]:6}  {signature[:200]}")
    return int(bool(hunt.findings))


if __name__ == "__main__":
    sys.exit(main())
