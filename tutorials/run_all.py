"""Runs every tutorial, NN_*.py in this folder, in order; ends with a line 'N passed, N failed'.

    python tutorials/run_all.py [-v] [number ...]       (make tutorials)

01 is started by torchrun on two ranks, once with minddp's class and once with PyTorch's, and both must end at
the same weights. The others start their own ranks. Each has TIMEOUT seconds; one that runs longer is killed
with all that it started. The output is shown for what fails (-v: for all). Exit status 1 if anything failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 180


def commands(page: Path) -> list[list[str]]:
    """What to run for a page; all runs must print the same last line."""
    if page.name.startswith("01_"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(page)]
        return [[sys.executable, *torchrun], [sys.executable, *torchrun, "--torch-ddp"]]
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


def run_page(page: Path) -> tuple[bool, str]:
    texts, endings = [], set()
    for command in commands(page):
        passed, output = run(command)
        texts.append(output)
        if not passed:
            return False, "\n".join(texts)
        endings.add(output.strip().rpartition("\n")[2])
    if len(endings) > 1:
        return False, "\n".join([*texts, f"the runs end differently: {sorted(endings)}"])
    return True, "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tutorials.")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all output")
    parser.add_argument("numbers", nargs="*", help="only these, as 03")
    arguments = parser.parse_args()
    pages = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    if arguments.numbers:
        pages = [page for page in pages if page.name[:2] in arguments.numbers]
    failed = 0
    for page in pages:
        begin = time.monotonic()
        passed, output = run_page(page)
        failed += not passed
        print(f"{'passed' if passed else 'FAILED'}  {page.name}  {time.monotonic() - begin:.1f} s", flush=True)
        if arguments.verbose or not passed:
            print(output, flush=True)
    print(f"{len(pages) - failed} passed, {failed} failed")
    return 1 if failed or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
