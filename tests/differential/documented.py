"""``docs/differences.md``, written from ``differences.toml``: ``python -m tests.differential.documented``."""

from __future__ import annotations

import tomllib
from pathlib import Path

LIST = Path(__file__).with_name("differences.toml")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "differences.md"

_HEAD = """# Differences you can notice

Programs drawn at random are trained with torch's class and with minddp's, and compared at each step (`make fuzz`).
These are the differences that are meant; any other fails the test. The page is written by `python -m
tests.differential.documented`, from `tests/differential/differences.toml`.

Beyond them: where torch goes on with gradients that are local to a rank, without a word, minddp averages them or
raises on every rank that would use them; and where torch raises, minddp may work. A few words are the
[glossary](glossary.md)'s: local gradient, past the wrapper, gradient view. A forward *waits* until a backward comes
through its outputs. Some of these programs make ranks call different collectives: Gloo ends a process that gets more
of another rank's data than it expects.
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
