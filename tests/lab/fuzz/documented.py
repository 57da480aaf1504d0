"""``docs/differences.md``, written from ``differences.toml``: ``python -m tests.lab.fuzz.documented``."""

from __future__ import annotations

import tomllib
from pathlib import Path

LIST = Path(__file__).with_name("differences.toml")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "differences.md"

_HEAD = """# Differences you can notice

Programs drawn at random are trained with torch's class and with minddp's, and compared at each step (`make lab
ARGS=fuzz`). These differences are intended; any other fails the test. `python -m tests.lab.fuzz.documented` writes
the page from `tests/lab/fuzz/differences.toml`.

There are two more rules. Where torch silently goes on with gradients that are local to a rank, minddp averages them
or raises on every rank that would use them. Where torch raises, minddp may work.

The [glossary](glossary.md) explains these terms: local gradient, bypassing DDP, gradient view. A forward *waits*
until a backward comes through its outputs. Some of these programs make ranks call different collectives. Gloo ends
a process that gets more of another rank's data than it expects.
"""


def page() -> str:
    """The page's text."""
    entries = tomllib.loads(LIST.read_text())["difference"]
    text, part = _HEAD, ""
    for entry in entries:
        if entry["part"] != part:
            part = entry["part"]
            text += f"\n## {part}\n"
        text += f"\n### {entry['title']}\n\n{entry['reason'].strip()}\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
