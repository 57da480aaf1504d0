"""Processes that an engine's run consists of: started with the same surroundings, ended by process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.forked import children_of

ROOT = Path(__file__).resolve().parents[3]


class EngineError(AssertionError):
    """A run did not end, or not well; the text has the processes' output."""


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a run: minddp and its command can be found, and nothing names ranks yet."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    command = commands / "minddp"  # where nothing is installed, as in a build in place
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m minddp "$@"\n')
    command.chmod(0o755)
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    others = ("PYTHON", "SLURM", "PET_", "OMPI_", "MASTER_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(others)}
    return {
        **kept,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


class Processes:
    """A context manager whose end kills what was started in it, and what that has started."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(self, name: str, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**surroundings(self.folder), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append((name, process, log))
        return process

    def wait(self, timeout: float, but: tuple[str, ...] = ()) -> None:
        """Until all have ended well, those in ``but`` aside.

        Raises:
            EngineError: one ended otherwise, or not in time.
        """
        deadline = time.monotonic() + timeout
        for name, process, _ in self.started:
            if name in but:
                continue
            try:
                status = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise EngineError(f"{name} did not end within {timeout} s\n{self.logs()}") from None
            if status != 0:
                raise EngineError(f"{name} ended with {status}\n{self.logs()}")

    def wait_until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Raises EngineError when ``holds`` has not become true, or all processes have ended before."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or all(process.poll() is not None for _, process, _ in self.started):
                raise EngineError(f"{what} was not reached within {seconds} s\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{log.read_text(errors='replace')[-4000:]}" for name, _, log in self.started)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        for _, process, _ in self.started:
            kill_tree(process.pid)
            process.wait(30)


def kill_tree(pid: int) -> None:
    """Kills a process and those below it, the uppermost first, so that nobody starts others anew."""
    for each in [pid, *children_of(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
