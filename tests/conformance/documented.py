"""``docs/conformance.md``, written from the lists that ``make conformance`` holds: ``python -m
tests.conformance.documented``."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable

from tests.conformance import cases
from tests.lab import transport

PAGE = cases.HERE.parents[1] / "docs" / "conformance.md"

_HEAD = """# PyTorch's own tests

The wheel of torch contains tests of its DistributedDataParallel. `make conformance` runs, with minddp's class in the
place of torch's, those that construct the class and pass with torch's on the CPU with Gloo, and fails unless each
passes or stands in a list with its reason. This page is written from these lists by `python -m
tests.conformance.documented`.
"""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines: list[tuple[object, ...]] = [heads, ("---",) * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _release(path: str) -> str:
    name = path.removeprefix("torch_passes").removesuffix(".txt").strip("-")
    return name or "2.13"


def _ddp() -> str:
    exceptions = cases.read_exceptions()
    parts = ["\n## DistributedDataParallel\n"]
    for path in sorted(cases.HERE.glob("torch_passes*.txt")):
        tests = [case.test for case in cases.read_passes(path)]
        listed = Counter(cases.theme(test) for test in tests if test in exceptions)
        counts = Counter(map(cases.theme, tests))
        rows = [(theme, count, count - listed[theme], listed[theme] or "") for theme, count in sorted(counts.items())]
        rows.append(("together", len(tests), len(tests) - listed.total(), listed.total()))
        heads = (f"torch {_release(path.name)}: theme", "pass with torch's class", "with minddp's", "listed")
        parts.append("\n" + _table(heads, rows))
    if exceptions:
        parts.append("\nListed:\n\n" + "".join(f"- `{test}`: {why}\n" for test, why in sorted(exceptions.items())))
    return "".join(parts)


def _transport() -> str:
    exceptions = tomllib.loads(transport.EXCEPTIONS.read_text())
    return (
        "\n## Process groups of shared memory\n\n"
        'With `"shm"` in the place of Gloo all of torch\'s tests of process groups pass that pass with Gloo '
        "(`make lab ARGS=conformance-shm`), but for these:\n\n"
        + "".join(f"- `{test}`: {why}\n" for test, why in exceptions.items())
    )


def page() -> str:
    """The page's text."""
    return _HEAD + _ddp() + _transport()


if __name__ == "__main__":
    PAGE.write_text(page())
