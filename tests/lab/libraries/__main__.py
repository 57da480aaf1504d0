"""What libraries around DDP do with torch's class and with minddp's, as a table.

A script of ours (``scripts/`` here, and of ``tests/libraries``) must end with torch's losses and weights; a test
program that a library ships must pass where it passes with torch's class. Exit status 1 when one does not.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.libraries.launch import CLASS, run, run_shipped

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5
SHIPPED_TIMEOUT = 400.0


@dataclass(frozen=True)
class Script:
    """One of ``scripts/``; ``needs`` are modules that must be there."""

    name: str
    file: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shipped:
    """A module that a library ships; ``wraps``: it makes a wrapper on CPU, which must be minddp's then."""

    name: str
    module: str
    wraps: bool = True


SUITES = [
    Script("Accelerate, a script", "accelerate_script.py", ("accelerate",)),
    Shipped("Accelerate's test_sync", "accelerate.test_utils.scripts.test_sync"),
    Shipped("Accelerate's test_ops", "accelerate.test_utils.scripts.test_ops", wraps=False),
    Shipped("Accelerate's test_ddp_comm_hook", "accelerate.test_utils.scripts.test_ddp_comm_hook"),
    Shipped("Accelerate's test_script", "accelerate.test_utils.scripts.test_script"),
    Shipped("Accelerate's data loop", "accelerate.test_utils.scripts.test_distributed_data_loop", wraps=False),
    Script("Lightning", "lightning_script.py", ("lightning",)),
    Script("Lightning Fabric", "fabric_script.py", ("lightning",)),
    Script("pytorch-ignite", "ignite_script.py", ("ignite",)),
    Script("transformers' Trainer", "transformers_script.py", ("transformers", "accelerate")),
    Script("PEFT's LoRA under Trainer", "peft_script.py", ("peft", "transformers", "accelerate")),
    Script("torchmetrics, EMA, AveragedModel", "ema_metrics_script.py", ("torchmetrics", "ema_pytorch")),
    Script("ZeroRedundancyOptimizer", "zero_script.py"),
    Script('ZeroRedundancyOptimizer, overlapped ("shm")', "zero_overlap_script.py"),
]


def main() -> int:
    parser = argparse.ArgumentParser("libraries", description=__doc__)
    parser.add_argument("--only", default="", help="suites whose name contains this")
    only = parser.parse_args().only.lower()
    failures: list[str] = []
    print(f"{'suite':46} {'torch':8} {'minddp':8} difference", flush=True)
    with tempfile.TemporaryDirectory(prefix="minddp-libraries-") as folder:
        for number, suite in enumerate(suite for suite in SUITES if only in suite.name.lower()):
            line = (_script if isinstance(suite, Script) else _shipped)(suite, Path(folder) / str(number), failures)
            print(f"{suite.name:46} {line}", flush=True)
    print(*failures, sep="\n\n", file=sys.stderr)
    return 1 if failures else 0


def _missing(modules: tuple[str, ...]) -> str | None:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{'-':8} {'-':8} not run: {', '.join(absent)} is not installed" if absent else None


def _script(suite: Script, folder: Path, failures: list[str]) -> str:
    if missing := _missing(suite.needs):
        return missing
    reports: dict[str, Any] = {}
    here = HERE / "scripts" / suite.file
    script = str(here) if here.exists() else suite.file
    for impl in ("torch", "minddp"):
        (folder / impl).mkdir(parents=True)
        try:
            reports[impl] = run(impl, script, folder / impl / "report.json", timeout=SHIPPED_TIMEOUT)
        except AssertionError as error:
            failures.append(f"{suite.name}: {error}")
            return "FAILED   -        ended badly" if impl == "torch" else "passed   FAILED   ended badly"
    theirs, ours = (dict(_leaves(reports[impl])) for impl in ("torch", "minddp"))
    numbers = [key for key, value in theirs.items() if isinstance(value, float)]
    worst = max(abs(theirs[key] - ours.get(key, float("inf"))) for key in numbers)
    swapped = {ours[key] for key, value in theirs.items() if value == CLASS["torch"]} == {CLASS["minddp"]}
    if worst > TOLERANCE or not swapped:
        failures.append(f"{suite.name}: numbers differ by up to {worst:.1e}, minddp's class at work: {swapped}")
        return f"{'passed':8} {'FAILED':8} up to {worst:.1e}"
    return f"{'passed':8} {'passed':8} " + ("none, to the bit" if worst == 0 else f"rounding, up to {worst:.0e}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    for key, part in items or ():
        yield from _leaves(part, f"{path}/{key}")


def _shipped(suite: Shipped, folder: Path, failures: list[str]) -> str:
    if missing := _missing((suite.module.partition(".")[0],)):
        return missing
    (status, output), (our_status, our_output) = (
        run_shipped(impl, suite.module, folder / impl, SHIPPED_TIMEOUT) for impl in ("torch", "minddp")
    )
    made = [int(times) for times in re.findall(r"minddp's class was constructed (\d+) times", our_output)]
    words = ["passed" if each == 0 else "fails" for each in (status, our_status)]
    if status == 0 and (our_status != 0 or (suite.wraps and not all(made))):
        failures.append(f"{suite.name}: {our_status}, wrappers made: {made}\n{our_output[-4000:]}")
        return f"{words[0]:8} {'FAILED':8} with torch's class it passes"
    if status != 0:
        return f"{words[0]:8} {words[1]:8} with torch's: {_last_error(output) or status}"
    return f"{words[0]:8} {words[1]:8} none; {made[0] if made else 0} wrappers a rank"


def _last_error(output: str) -> str:
    found = re.findall(r"^\[rank\d\]: (\w*(?:Error|Exception): .+)$", output, re.MULTILINE)
    return found[-1][:90] if found else ""


if __name__ == "__main__":
    sys.exit(main())
