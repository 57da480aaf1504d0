"""The pages use the field's terms, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.website.layout import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "csrc/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
MADE = {f"{page}.md" for pages in SECTIONS.values() for page, path in pages.items() if not path}  # by the site
# A word that the pages avoid -> what they say.
TERMS = {
    r"told": "reported",
    r"past (?:the|a) wrapper": "bypassing DDP",
    r"(?:stands?|stood|standing) still": "blocked, idle",
    r"whereabouts": "location",
    r"board": "store client",
    r"verdicts?": "diagnosis",
    r"known part": "already-reduced part",
    r"windows?": "gradient view",
    r"sharers?": "wrappers that share parameters",
    r"lets? go|letting go": "release",
    r"steps? aside": "yield ownership",
}


def prose(text: str) -> str:
    """Without code, and without what stands in quotation marks: messages keep their words."""
    text = re.sub(r"```.*?```|``?[^`\n]*``?", "", text, flags=re.DOTALL)
    return re.sub(r'"[^"\n]*"', "", text)


@pytest.mark.parametrize("page", PAGES)
def test_terms(page: str) -> None:
    text = prose((ROOT / page).read_text())
    found = {match[0]: term for word, term in TERMS.items() for match in re.finditer(rf"\b(?:{word})\b", text, re.I)}
    assert not found, f"{page}: say instead: {found}"


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_of_pages_lead_to_files_and_headings() -> None:
    """make docs tries them in the site, where it can be built; that reads a page line by line."""
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        broken += [f"{page}: {link}: two lines" for link in re.findall(r"\[[^\[\]\n]*\n[^\[\]]*\]\([^()]+\)", text)]
        for link in re.findall(r"\]\(([^()\s]+)\)", text):
            if re.match(r"[a-z]+:", link) or link in MADE:
                continue
            name, _, anchor = link.partition("#")
            file = ((ROOT / page).parent / name).resolve() if name else ROOT / page
            if not file.is_file() or (anchor and anchor not in anchors(file.read_text())):
                broken.append(f"{page}: {link}")
    assert not broken


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
