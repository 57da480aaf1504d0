"""One script under every engine, and whether it ends with the weights of torch's class.

Exit status 1 when one does not; what the machine lacks is said, and is no failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.engines import replicas
from tests.lab.engines.engines import ENGINES, Engine, reference
from tests.lab.engines.judging import verdict
from tests.lab.engines.processes import EngineError


def main() -> int:
    parser = argparse.ArgumentParser("engines", description=__doc__)
    parser.add_argument("--only", default="", help="engines whose name contains this")
    only = parser.parse_args().only.lower()
    chosen = [engine for engine in ENGINES if only in engine.name.lower()]
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="minddp-engines-") as name:
        folder = Path(name)
        wholes = {ranks: reference(folder / f"whole{ranks}", ranks) for ranks in {engine.ranks for engine in chosen}}
        print(f"{'engine':40} {'ranks':>5} {'seconds':>8}  weights, beside torch's class by torchrun", flush=True)
        for index, engine in enumerate(chosen):
            began = time.monotonic()
            line = _one(engine, folder / str(index), wholes[engine.ranks], failures)
            print(f"{engine.name:40} {engine.ranks:5} {time.monotonic() - began:8.1f}  {line}", flush=True)
        if only in "torchft":
            began = time.monotonic()
            line = _replicas(folder / "replicas", failures)
            print(f"{'torchft, a replica group lost':40} {2:5} {time.monotonic() - began:8.1f}  {line}", flush=True)
    print(*failures, sep="\n\n", file=sys.stderr)
    return 1 if failures else 0


def _one(engine: Engine, folder: Path, whole: dict, failures: list[str]) -> str:
    missing = engine.missing()
    if missing:
        return f"not run: {missing}"
    try:
        return verdict(engine, engine.run(folder), whole)
    except (EngineError, AssertionError) as error:
        failures.append(f"{engine.name}: {error}")
        return "FAILED"


def _replicas(folder: Path, failures: list[str]) -> str:
    if why := replicas.missing():
        return f"not run: {why}"
    try:
        return replicas.run(folder)
    except AssertionError as error:
        failures.append(f"torchft: {error}")
        return "FAILED"


if __name__ == "__main__":
    sys.exit(main())
