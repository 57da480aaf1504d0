"""Runs every tutorial, NN_*.py in this folder, in order; ends with a line 'N passed, N failed'.

    python tutorials/run_all.py [-v] [--accept] [number ...]       (make tutorials)

01 is started by torchrun on two ranks, once with minddp's class and once with PyTorch's, and both must end at
the same weights. The others start their own ranks. Each has TIMEOUT seconds; one that runs longer is killed
with all that it started. The output is shown for what fails (-v: for all). Exit status 1 if anything failed.

What a tutorial prints is compared with expected/, where … stands for what changes from run to run, on a line of
its own for any lines. --accept writes expected/ anew. The output is kept in build/tutorials, for the site.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
EXPECTED, KEPT = FOLDER / "expected", FOLDER.parent / "build" / "tutorials"
TIMEOUT = 300

# What changes from run to run, or from machine to machine: times, errors of rounding, digests, ports.
CHANGES = re.compile(
    r"[+-]?\d[\d.]*(?= (?:ms|s|us|seconds)\b)|\b\d(?:\.\d+)?e-\d\d\b|\b[0-9a-f]{16}\b|"
    r"(?<=loss )\d\.\d+|(?<=accuracy )\d\.\d+|\d\.\d+(?= nats)|(?<= )\d+\.\d\d(?= {2}|$)|\d+(?= of \d+ allreduces)|"
    r"[█░]+",
    re.MULTILINE,
)


def masked(output: str) -> str:
    return "\n".join(line.rstrip() for line in CHANGES.sub("…", output).splitlines()).strip("\n") + "\n"


def matches(expected: str, output: str) -> bool:
    """Spaces count as one, since what changes changes its width, too."""

    def pattern(line: str) -> str:
        parts = [re.escape(part) for part in re.sub(r" +", " ", line).split("…")]
        return r"[^\n]*?".join(parts)

    any_lines = r"(?:[^\n]*\n)*?"
    lines = [any_lines if line.strip() == "…" else pattern(line.rstrip()) + r"\n" for line in expected.splitlines()]
    found = "".join(re.sub(r" +", " ", line.rstrip()) + "\n" for line in output.strip("\n").splitlines())
    return re.fullmatch("".join(lines), found) is not None


def commands(page: Path) -> list[list[str]]:
    """What to run for a page; all runs must print the same last line."""
    if page.name.startswith("01_"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(page)]
        return [[sys.executable, *torchrun], [sys.executable, *torchrun, "--torch-ddp"]]  # the first one is kept
    return [[sys.executable, str(page)]]


def run(command: list[str]) -> tuple[bool, str]:
    """(ended well, output) of one command, in a process group of its own so that all of it can be ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return False, f"{output}\ndid not end within {TIMEOUT} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode == 0, output


def run_page(page: Path, accept: bool) -> tuple[bool, str]:
    texts, endings = [], set()
    for command in commands(page):
        passed, output = run(command)
        texts.append(output)
        if not passed:
            return False, "\n".join(texts)
        endings.add(output.strip().rpartition("\n")[2])
    if len(endings) > 1:
        return False, "\n".join([*texts, f"the runs end differently: {sorted(endings)}"])
    expected = EXPECTED / f"{page.stem}.txt"
    if accept:
        EXPECTED.mkdir(exist_ok=True)
        expected.write_text(masked(texts[0]))
    if not expected.exists() or not matches(expected.read_text(), texts[0]):
        told = f"it prints something else than {expected.relative_to(FOLDER.parent)} (--accept writes that anew)"
        return False, "\n".join([*texts, told])
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / expected.name).write_text(texts[0])
    return True, "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tutorials.")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all output")
    parser.add_argument("--accept", action="store_true", help="what is printed now is what is expected")
    parser.add_argument("numbers", nargs="*", help="only these, as 03")
    arguments = parser.parse_args()
    pages = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    if arguments.numbers:
        pages = [page for page in pages if page.name[:2] in arguments.numbers]
    failed = 0
    for page in pages:
        begin = time.monotonic()
        passed, output = run_page(page, arguments.accept)
        failed += not passed
        print(f"{'passed' if passed else 'FAILED'}  {page.name}  {time.monotonic() - begin:.1f} s", flush=True)
        if arguments.verbose or not passed:
            print(output, flush=True)
    print(f"{len(pages) - failed} passed, {failed} failed")
    return 1 if failed or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
