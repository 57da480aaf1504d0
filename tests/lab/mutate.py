"""Plants one fault at a time, at random places of Python and C++, in a copy of the tree; lists what no test sees.

    make lab ARGS="mutate --python 60 --cpp 60 --folder build/mutate"
    make lab ARGS="mutate --python 10 --cpp 0 --seed 3 minddp/planner"
    make lab ARGS="mutate --only csrc/reducer/bucket.cpp:118:3 --tests tests/module"     # a survivor once more

A fault changes a comparison, an arithmetic operator, or what a function returns. In Python the syntax tree gives the
places, in C++ the text outside of comments and strings. The tests are those of the file's room, without what is
marked ``all``; a time limit counts as caught. The copy is compiled without optimization, and after a fault in C++ the
unit with the fault alone is compiled again. A fault that does not compile is replaced by another one.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
SWAPS |= {"in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*"}
OPERATOR = re.compile(r"(?<=\s)(<=|>=|==|!=|//|<|>|\+|-|\*|/|%|is\s+not|not\s+in|is|in)(?=[\s(])")
CPP_OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|<|>|\+|-|\*|/|%)(?= )")
CPP_RETURN = re.compile(r"\breturn\s+([^;{}]+);")
# Comments, strings, characters, and lines that begin so.
CPP_OTHER = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^ *(?:#|template|static_assert)[^\n]*',
    re.DOTALL | re.MULTILINE,
)
RETURNED = {"true": "false", "false": "true", "True": "False", "False": "True"}
EQUAL = ("None", "nullptr", "0", "{}")  # the fault would change nothing
# The tests of a room, by the beginning of a file's path; the first that fits.
TESTS = {
    "csrc/shm": "tests/shm tests/faults/test_shm_faults.py tests/faults/test_shm_fork.py",
    "csrc/copy": "tests/reducer tests/shm",
    "csrc/wire": "tests/reducer tests/functional",
    "csrc/": "tests/reducer tests/parity tests/module tests/programs",
    "minddp/torch_surface": "tests/module tests/parity tests/programs",
    "minddp/guards": "tests/guards tests/faults tests/programs",
    "minddp/shm": "tests/shm",
    "minddp/cli": "tests/cli",
    "minddp/functional/sync_batchnorm": "tests/sync_batchnorm tests/functional",
    "minddp/": "tests/module tests/reducer tests/parity tests/programs tests/faults/test_missing_peers.py",
}


class Fault(NamedTuple):
    path: str
    begin: int  # in bytes
    end: int
    text: str
    becomes: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}  {' '.join(self.text.split())}  ->  {self.becomes}"


def python_places(source: bytes) -> Iterator[tuple[int, int, str]]:
    """Begin, end, and what stands there then."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def ends(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Return) and node.value is not None:
            begin, end = ends(node.value)
            yield begin, end, RETURNED.get(source[begin:end].decode(), "None")
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Compare):
            pairs = list(zip([node.left, *node.comparators], node.comparators))
        elif isinstance(node, ast.BinOp):
            pairs = [(node.left, node.right)]
        for left, right in pairs:
            begin, end = ends(left)[1], ends(right)[0]
            if found := OPERATOR.search(source[begin:end].decode() + " "):
                yield begin + found.start(), begin + found.end(), SWAPS[" ".join(found[0].split())]


def cpp_places(source: bytes) -> Iterator[tuple[int, int, str]]:
    text = CPP_OTHER.sub(lambda found: re.sub(r"[^\n]", "_", found[0]), source.decode("latin-1"))
    for found in CPP_OPERATOR.finditer(text):
        yield found.start(), found.end(), SWAPS[found[0]]
    for found in CPP_RETURN.finditer(text):
        yield found.start(1), found.end(1), RETURNED.get(found[1], "{}")


def faults_of(path: str) -> list[Fault]:
    source = (ROOT / path).read_bytes()
    found = []
    for begin, end, becomes in (python_places if path.endswith(".py") else cpp_places)(source):
        if source[begin:end].decode() in EQUAL:
            continue
        line, column = source.count(b"\n", 0, begin) + 1, begin - source.rfind(b"\n", 0, begin)
        found.append(Fault(path, begin, end, source[begin:end].decode(), becomes, line, column))
    return found


class Copy:
    """The tree, in a folder of its own: with faults, built and tested."""

    def __init__(self, folder: Path, seconds: float):
        self.root, self.seconds = folder, seconds
        folder.mkdir(parents=True, exist_ok=True)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        paths = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths += [path.relative_to(ROOT).as_posix() for path in (ROOT / "minddp").glob("_*.so")]
        for path in (*paths, "minddp/_build.json"):
            if (ROOT / path).exists():
                self.write(path, (ROOT / path).read_bytes().replace(b'CXX_FLAGS = ["-O3"', b'CXX_FLAGS = ["-O0"'))

    def write(self, path: str, text: bytes) -> None:
        file = self.root / path
        if not file.exists() or file.read_bytes() != text:  # otherwise it keeps its time, for ninja
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)

    def run(self, seconds: float, *command: str) -> tuple[bool, str]:
        """Whether it ended well in time, and what it printed last."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONPATH": str(self.root), "MINDDP_CUDA": "0", "PATH": path}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=self.root, env=environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False, f"no end within {seconds:.0f} s"
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                except ProcessLookupError:
                    pass
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        said = re.findall(r"^(?:FAILED|ERROR) .*$|^.*\berror: .*$", text, re.M) or text.splitlines()[-1:] or [""]
        return status == 0, said[0]

    def build(self) -> tuple[bool, str]:
        return self.run(1200, "setup.py", "-q", "build_ext", "--inplace")

    def test(self, tests: str) -> tuple[bool, str]:
        options = ["-n", "2", "-x", "-m", "not all", "--timeout", "60", "--tb", "no", "-p", "no:randomly"]
        return self.run(self.seconds, "-m", "pytest", *options, *tests.split())


def tests_of(path: str) -> str:
    begin, room = next(begin for begin in TESTS if path.startswith(begin)), f"tests/{path.split('/')[1]}"
    return room if begin == "minddp/" and (ROOT / room).is_dir() else TESTS[begin]


def try_all(drawn: list[Fault], number: int, copy: Copy, tests: str | None) -> list[Fault]:
    """Tries faults until ``number`` of them compiled; those of a file together. The faults that survived."""
    survivors, sound, tried = [], dict[str, tuple[bool, str]](), 0
    kept, spare = drawn[:number], drawn[number:]
    kept.sort(reverse=True)
    while kept:
        fault = kept.pop()
        begin, chosen = time.monotonic(), tests or tests_of(fault.path)
        if chosen not in sound:
            sound[chosen] = copy.test(chosen)
        if not sound[chosen][0]:
            raise SystemExit(f"without a fault {chosen} fails: {sound[chosen][1]}")
        source = (copy.root / fault.path).read_bytes()
        copy.write(fault.path, source[: fault.begin] + fault.becomes.encode() + source[fault.end :])
        compiled = fault.path.endswith(".py") or copy.build()[0]
        green, said = copy.test(chosen) if compiled else (False, "")
        copy.write(fault.path, source)
        if not compiled:
            kept += [spare.pop()] if spare else []
            continue
        tried += 1
        survivors += [fault] if green else []
        verdict = "SURVIVED" if green else "caught"
        print(f"{tried:3} {verdict:8} {time.monotonic() - begin:4.0f} s  {fault}", flush=True)
        if not green:
            print(" " * 20, said, flush=True)
    return survivors


def main() -> int:
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mutate", description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("paths", nargs="*", default=["minddp", "csrc"], help="files and folders; default: all")
    parser.add_argument("--python", type=int, default=5, metavar="N", help="so many faults in Python")
    parser.add_argument("--cpp", type=int, default=5, metavar="N", help="so many faults in C++, CUDA's aside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the fault at this PATH:LINE:COLUMN")
    parser.add_argument("--tests", help="these tests in place of those of the file's room")
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one fault")
    parser.add_argument("--folder", type=Path, help="keep the copy, and what is built there, for the next time")
    options = parser.parse_args()
    files = [file for path in options.paths for file in (ROOT / path, *(ROOT / path).rglob("*"))]
    paths = sorted({file.relative_to(ROOT).as_posix() for file in files if file.suffix in (".py", ".h", ".cpp")})
    faults = [fault for path in paths if "/cuda/" not in path for fault in faults_of(path)]
    random.Random(options.seed).shuffle(faults)
    python = [fault for fault in faults if fault.path.endswith(".py")]
    cpp = [fault for fault in faults if not fault.path.endswith(".py")]
    print(f"{len(python)} places in Python, {len(cpp)} in C++")
    if options.only:
        python, cpp = ([f for f in some if str(f).startswith(f"{options.only} ")] for some in (python, cpp))
    with tempfile.TemporaryDirectory(prefix="minddp-mutate-", ignore_cleanup_errors=True) as folder:
        copy = Copy((options.folder or Path(folder)).resolve(), options.seconds)
        survivors = try_all(python, options.python, copy, options.tests)
        if options.cpp and cpp:
            built, said = copy.build()
            if not built:
                raise SystemExit(f"the copy does not compile: {said}")
            survivors += try_all(cpp, options.cpp, copy, options.tests)
    print(f"\n{len(survivors)} survived", *survivors, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
