"""Builds the C++ with sanitizers, and runs it.

Three parts, each named on the command line, or all:

- ``planted``: faults planted in copies of the transport, which the driver must report: so it can see such things.
- ``shm``: ``csrc/shm`` under ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer, with
  random operations on 2 to 5 ranks, each a thread of one process (``shm_driver.cpp``).
- ``extension``: the whole extension under AddressSanitizer and UndefinedBehaviorSanitizer, with the tests that start
  ranks. Leaks are not looked for: Python and torch free little at exit.

Prints a line for each run; ends with 1 where a sanitizer reported, an answer was wrong, or a planted fault was not
seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "sanitize"
PARTS = ("planted", "shm", "extension")

# What is not the driver's: sources that need Python, or torch's futures, which carry no instrumentation.
SOURCES = ("allreduce", "counter", "exchange", "group", "segment")
WRAPPED = "-Wl,--wrap=mmap,--wrap=munmap,--wrap=mprotect"
# vptr: compares types across libraries that hide them.
FLAGS = ("-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g", "-O1", "-std=c++20")
SANITIZERS = {"thread": "thread", "address": "address,undefined"}

# Tests that start ranks. Not the fuzzer's, nor what only reads the sources.
TESTS = ("functional", "faults", "module", "parity", "programs", "reducer", "shm", "sync_batchnorm")
# Those of memory that has run out ask for more than a sanitizer grants; the other reads the sources.
DESELECTED = ("out_of_memory", "test_layering")


class Planted(NamedTuple):
    """A fault, and the build in which the driver must report it."""

    what: str
    sanitizer: str
    file: str
    text: str
    becomes: str


PLANTED = (
    Planted(
        "who waits for a counter does not see what was written before it",
        "thread",
        "counter.h",
        "value_.load(std::memory_order_acquire)",
        "value_.load(std::memory_order_relaxed)",
    ),
    Planted(
        "a slot is filled again before all peers have read it",
        "thread",
        "exchange.cpp",
        "write_tick_ - kSlots + 1",
        "write_tick_ - 2 * kSlots + 1",
    ),
    Planted(
        "a tick is shown before it is written",
        "thread",
        "exchange.cpp",
        "  own_header(write_tick_) = Header{sequence_, signature_};\n"
        "  group_.control(rank()).posted.store(++write_tick_);\n",
        "  group_.control(rank()).posted.store(++write_tick_);\n"
        "  own_header(write_tick_ - 1) = Header{sequence_, signature_};\n",
    ),
    Planted(
        "a result is copied one byte too far",
        "address",
        "allreduce.cpp",
        "copy(share.data, exchange_.await(owner), share.bytes);",
        "copy(share.data, exchange_.await(owner), share.bytes + 1);",
    ),
)


def _torch() -> tuple[list[str], list[str]]:
    """What the compiler and the linker are told of torch."""
    from torch.utils import cpp_extension

    library = Path(cpp_extension.TORCH_LIB_PATH)
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    return include, [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-ltorch", "-lc10", "-lpthread"]


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None, **options: object) -> tuple[int, str]:
    """The exit status and what was printed, of both streams."""
    done = subprocess.run(
        command, env=dict(environment or os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        **options,  # type: ignore[call-overload]
    )  # fmt: skip
    return done.returncode, done.stdout


def _build_driver(sanitizer: str, sources: Path, name: str) -> Path:
    """The driver with the transport of ``sources``, a ``csrc``; objects that are newer than all sources stay.

    Raises:
        SystemExit: the compiler's words.
    """
    include, libraries = _torch()
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"-fsanitize={SANITIZERS[sanitizer]}", *FLAGS, f"-I{sources}", *include]
    files = [sources / "shm" / f"{part}.cpp" for part in SOURCES] + [
        sources / "copy" / "reduce.cpp",
        HERE / "shm_driver.cpp",
        HERE / "one_mapping.cpp",
    ]
    newest = max(path.stat().st_mtime for path in [*(sources / "shm").glob("*"), *HERE.glob("*.cpp")])

    def compile_one(file: Path) -> tuple[int, str]:
        target = folder / f"{file.stem}.o"
        if target.exists() and target.stat().st_mtime > newest:
            return 0, ""
        return _run([_compiler(), *flags, "-c", str(file), "-o", str(target)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for status, words in pool.map(compile_one, files):
            if status != 0:
                raise SystemExit(words)
    objects = [str(folder / f"{file.stem}.o") for file in files]
    link = [f"-fsanitize={SANITIZERS[sanitizer]}", WRAPPED, *objects, "-o", str(folder / "driver"), *libraries]
    status, words = _run([_compiler(), *link])
    if status != 0:
        raise SystemExit(words)
    return folder / "driver"


def _drive(driver: Path, ranks: int, operations: int, seed: int, seconds: float) -> tuple[bool, str]:
    """Whether nothing was reported and all answers were right; and what was printed."""
    # Without address space layout randomization: ThreadSanitizer needs its own places free.
    command = ["setarch", "-R", str(driver), str(ranks), str(operations), str(seed)]
    environment = os.environ | {
        "TSAN_OPTIONS": "halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    try:
        status, words = _run(command, environment, timeout=seconds)
    except subprocess.TimeoutExpired as expired:
        return False, f"did not end within {seconds:.0f} s: {expired.output}"
    return status == 0 and "all right" in words, words


class Row(NamedTuple):
    part: str
    what: str
    good: bool
    seconds: float
    words: str


def planted(seed: int) -> Iterator[Row]:
    for number, fault in enumerate(PLANTED):
        begin = time.monotonic()
        folder = BUILD / f"planted{number}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        file = folder / "csrc" / "shm" / fault.file
        text = file.read_text()
        if fault.text not in text:
            raise SystemExit(f"planted fault {fault.what!r}: {fault.file} has no {fault.text!r}")
        file.write_text(text.replace(fault.text, fault.becomes))
        driver = _build_driver(fault.sanitizer, folder / "csrc", folder.name)
        quiet, words = _drive(driver, 3, 3000, seed, 300)
        # The transport's own check of what it reads may be the first to notice.
        seen = not quiet and any(said in words for said in ("Sanitizer", "instead of", "runs another collective"))
        yield Row("planted", fault.what, seen, time.monotonic() - begin, words)


def shm(seed: int, operations: int) -> Iterator[Row]:
    for sanitizer, flag in SANITIZERS.items():
        driver = _build_driver(sanitizer, ROOT / "csrc", sanitizer)
        for ranks in (2, 3, 4, 5):
            begin = time.monotonic()
            good, words = _drive(driver, ranks, operations // 4, seed, 60 + operations)
            what = f"{operations // 4} operations on {ranks} ranks, {flag}"
            yield Row("shm", what, good, time.monotonic() - begin, words)


def _library(name: str) -> str:
    return _run([_compiler(), f"-print-file-name={name}"])[1].strip()


def _build_extension() -> Path:
    environment = os.environ | {
        "CFLAGS": f"-fsanitize={SANITIZERS['address']} -fno-sanitize=vptr -fno-omit-frame-pointer",
        "LDFLAGS": f"-fsanitize={SANITIZERS['address']}",
        "MINDDP_CUDA": "0",
    }
    library = BUILD / "extension" / "lib"
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD / "extension")]
    status, words = _run([*command, "--build-lib", str(library)], environment, cwd=ROOT)
    if status != 0:
        raise SystemExit(words)
    return library


def extension(tests: Sequence[str]) -> Iterator[Row]:
    library = _build_extension()
    logs, copy = BUILD / "logs", BUILD / "tests"
    for folder in (logs, copy):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # Beside no folder named minddp, which would be found before the library.
    for name in ("tests", "benchmarks"):  # whose links the tests of faults cut
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(_library, ("libasan.so", "libubsan.so", "libstdc++.so"))),
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={logs}/asan",
        "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:log_path={logs}/ubsan",
        "PYTHONPATH": f"{library}:{copy}",
    }
    for folder_name in tests:
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", f"tests/{folder_name}", "-o", "timeout=600"]
        command += ["-k", " and ".join(f"not {name}" for name in DESELECTED)]
        status, words = _run(command, environment, cwd=copy)
        reports = "\n".join(path.read_text() for path in sorted(logs.iterdir()))
        for path in logs.iterdir():
            path.unlink()
        last = words.strip().splitlines()[-1] if words.strip() else ""
        good = status == 0 and not reports
        yield Row("extension", f"tests/{folder_name}: {last}", good, time.monotonic() - begin, words + reports)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--operations", type=int, default=100_000, help="of the transport, over 2 to 5 ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files in tests/ for the extension")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows = {
        "planted": lambda: planted(options.seed),
        "shm": lambda: shm(options.seed, options.operations),
        "extension": lambda: extension(options.tests),
    }
    bad = 0
    for part in options.parts or PARTS:
        for row in rows[part]():
            verdict = (
                ("seen" if row.good else "NOT SEEN") if part == "planted" else ("clean" if row.good else "NOT CLEAN")
            )
            print(f"{row.part:10} {verdict:10} {row.seconds:6.0f} s  {row.what}", flush=True)
            if not row.good:
                bad += 1
                print(row.words[-20_000:], flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
