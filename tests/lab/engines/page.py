"""The lines that docs/launching.md gives its readers; engines run these very lines."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "launching.md"


def blocks(heading: str) -> list[str]:
    """The code blocks of one section, in order."""
    _, found, rest = PAGE.read_text().partition(f"\n## {heading}\n")
    if not found:
        raise LookupError(f"{PAGE.name} has no section {heading!r}")
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def headings() -> list[str]:
    return re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
