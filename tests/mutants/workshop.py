"""A copy of the repository, in which faults are planted, built and tested."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import zygote
from .catalog import ROOT, Mutant, batches, planted, spot_of, with_switches
from .places import Sources, Spot

__all__ = ["Outcome", "Workshop"]

# What a copy does without.
_LEFT_OUT = (".git", ".venv*", "__pycache__", "dist", "build", ".*_cache", ".hypothesis", "results")
_SWITCH = """\
#pragma once
#ifdef __cplusplus
#include <cstdlib>
#include <cstring>
inline bool minddp_mutant(const char* id) {
  static const char* const awake = std::getenv("MINDDP_MUTANT");
  return awake != nullptr && std::strcmp(awake, id) == 0;
}
#endif
"""
# Little optimization: it compiles faster.
_COMPILER = """\
#!/bin/sh
exec {compiler} -include {switch} "$@" -O1
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        verdict: ``"caught"``, ``"SURVIVED"``, or ``"ERROR"``: the list is wrong, not the tests.
        by: the test that failed; of an error: what happened.
        seconds: for its tests.
    """

    verdict: str
    by: str
    seconds: float


class Workshop:
    """The copy. Kept between runs where a folder is given: then only what changed is compiled again.

    Args:
        folder: where it is made.
        timeout: seconds that one test may take; one that takes longer has caught its mutant.
    """

    def __init__(self, folder: Path, timeout: int):
        self.root = folder / "repository"
        self._tools = folder / "tools"
        self._timeout = timeout
        self._copy()

    def _copy(self) -> None:
        """The repository as it is, over what is there; files that are the same keep their times, for ninja."""
        self.root.mkdir(parents=True, exist_ok=True)
        for path in _files(ROOT):
            target = self.root / path
            if not target.exists() or target.read_bytes() != (ROOT / path).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, target)
        for path in _files(self.root):
            if not (ROOT / path).exists():
                (self.root / path).unlink()

    def try_all(self, mutants: Sequence[Mutant], tell: Callable[[Mutant, Outcome], None]) -> None:
        """Those in Python first, with the extension as it is; then those in C++, in as few builds as will do."""
        sources = Sources(self.root)
        spots = [(mutant, spot_of(mutant, sources)) for mutant in mutants]
        for mutant, spot in spots:
            if not mutant.is_cpp:
                with self._changed({spot.file: partial(planted, mutant, spot)}):
                    tell(mutant, self._test(mutant))
        for batch in batches([(mutant, spot) for mutant, spot in spots if mutant.is_cpp]):
            self._try_batch(batch, tell)

    def _try_batch(self, batch: list[tuple[Mutant, Spot]], tell: Callable[[Mutant, Outcome], None]) -> None:
        if batch[0][0].alone:
            ((mutant, spot),) = batch
            edits: dict[str, Callable[[str], str]] = {spot.file: partial(planted, mutant, spot)}
        else:
            files = dict.fromkeys(spot.file for _, spot in batch)
            edits = {file: partial(with_switches, [each for each in batch if each[1].file == file]) for file in files}
        with self._changed(edits):
            complaint = self._build()
            if complaint is None:
                with self._zygotes() as shared:
                    for mutant, _ in batch:
                        tell(mutant, self._test(mutant, **shared))
        if complaint is not None and len(batch) == 1:
            tell(batch[0][0], Outcome("ERROR", f"does not compile: {complaint}", 0.0))
        elif complaint is not None:  # which of them?
            print(f"a batch does not compile, so each mutant of it is built alone: {complaint}", flush=True)
            for each in batch:
                self._try_batch([each], tell)

    @contextmanager
    def _changed(self, edits: dict[str, Callable[[str], str]]) -> Iterator[None]:
        """Files of the copy, changed for a while."""
        sound = {file: (self.root / file).read_text() for file in edits}
        try:
            for file, edit in edits.items():
                (self.root / file).write_text(edit(sound[file]))
            yield
        finally:
            for file, text in sound.items():
                (self.root / file).write_text(text)

    # --- testing ---

    @contextmanager
    def _zygotes(self) -> Iterator[dict[str, str]]:
        """The environment in which tests share zygotes (tests/zygote.py): those that have imported one build."""
        hold = "import sys; from tests import zygote; zygote.start_zygotes(); print(flush=True); sys.stdin.read()"
        with tempfile.TemporaryDirectory(prefix="minddp-zygotes-", ignore_cleanup_errors=True) as folder:
            shared = {zygote.FOLDER: folder}
            holder = subprocess.Popen(
                [sys.executable, "-c", hold], cwd=self.root, env={**self._environment(), **shared},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            with holder:  # its end is theirs
                assert holder.stdout is not None and holder.stdout.readline()
                yield shared

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.root)}

    def _test(self, mutant: Mutant, **environment: str) -> Outcome:
        begin = time.monotonic()
        verdict, by = self.run_tests(mutant.tests, MINDDP_MUTANT=mutant.id, **environment)
        return Outcome(verdict, by, time.monotonic() - begin)

    def run_tests(self, tests: Sequence[str], **environment: str) -> tuple[str, str]:
        """``(verdict, by)``: whether one of ``tests`` fails, and which. A hang is a failure, too."""
        command = [sys.executable, "-m", "pytest", "-x", "--tb=line", f"--timeout={self._timeout}", *tests]
        output = self.root.parent / "output.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=self.root, env={**self._environment(), **environment}, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(self._timeout * (1 + len(tests)))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        return _verdict(code, output.read_text(errors="replace"))

    # --- building ---

    def _build(self) -> str | None:
        """None, or the compiler's first complaint."""
        if not (self._tools / "c++").exists():
            self._make_compiler()
        environment = {**os.environ, "CXX": str(self._tools / "c++"), "MINDDP_CUDA": "0"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # ninja lies beside Python
        result = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=self.root, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if result.returncode == 0:
            return None
        text = result.stdout + result.stderr
        complaint = re.search(r"^.*\berror: .*$", text, re.MULTILINE)
        return complaint.group(0) if complaint else text[-300:]

    def _make_compiler(self) -> None:
        self._tools.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
        switch, script = self._tools / "switch.h", self._tools / "c++"
        switch.write_text(_SWITCH)
        script.write_text(_COMPILER.format(compiler=compiler, switch=switch))
        script.chmod(0o755)


def _verdict(code: int | None, output: str) -> tuple[str, str]:
    """What an end of pytest means: its exit code, or None for a hang, and what it printed."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if code == 0:
        return "SURVIVED", ""
    if code in (4, 5):  # wrong arguments, or nothing collected
        return "ERROR", failed[0] if failed else "pytest found nothing to run"
    if failed:
        return "caught", failed[0]
    return "caught", "a test that never ended" if code is None else f"pytest ended with {code}"


def _files(root: Path) -> list[Path]:
    """What a copy consists of, from the root."""
    found = []
    for folder, folders, names in os.walk(root):
        ignored = shutil.ignore_patterns(*_LEFT_OUT)(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in ignored]
        found += [(Path(folder) / name).relative_to(root) for name in names if name not in ignored]
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the ranks that it started: they are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
