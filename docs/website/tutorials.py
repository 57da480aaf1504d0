"""A tutorial as a page: its cells, what it prints, its pictures.

A tutorial is a program. Its docstring is the page's beginning; after that, a line `# %% [markdown]` begins prose,
which stands in comments, and a line `# %%` begins code. Ranks are processes that import the file, so a tutorial's
cells define functions, and its last one runs them.

What it prints comes from run_all.py, which keeps it in build/tutorials and compares it with tutorials/expected.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .layout import ROOT, Layout

OUTPUT = ROOT / "build" / "tutorials"
PROSE = re.compile(r"^# %% \[markdown\]\s*$")
CELL = re.compile(r"^# %%")


def cells(text: str) -> list[tuple[str, int, int]]:
    """(kind, first line, last line), "prose" or "code"; lines count from 1. The docstring is not among them."""
    lines = text.splitlines()
    first = ast.parse(text).body[0].end_lineno + 1
    found: list[tuple[str, int, int]] = []
    kind, begin = "code", first
    for number in range(first, len(lines) + 2):
        line = lines[number - 1] if number <= len(lines) else "# %%"
        if not CELL.match(line):
            continue
        used = [n for n in range(begin, number) if lines[n - 1].strip()]
        if used:
            found.append((kind, used[0], used[-1]))
        kind, begin = ("prose" if PROSE.match(line) else "code"), number + 1
    return found


def title(text: str) -> str:
    """The docstring's first sentence, without the number."""
    return re.split(r"[.:](?:\s|$)", re.sub(r"^\d\d\. ", "", ast.get_docstring(ast.parse(text)) or ""))[0]


def sections(output: str) -> tuple[dict[str, str], str]:
    """What is printed under "1.", "2.", ...; and the rest."""
    numbered: dict[str, list[str]] = {}
    rest: list[str] = []
    current = rest
    for line in output.splitlines():
        begins = re.match(r"(\d)\. ", line)
        if begins:
            current = numbered.setdefault(begins[1], [])
        current.append(line)
    return {number: "\n".join(lines).rstrip() for number, lines in numbered.items()}, "\n".join(rest).strip("\n")


def printed(path: str) -> str:
    return (OUTPUT / f"{Path(path).stem}.txt").read_text().strip("\n")


def ensure_outputs(layout: Layout) -> None:
    """Runs the tutorials whose kept output is older than they or the package."""
    package = [*ROOT.glob("minddp/**/*.py"), *ROOT.glob("minddp/_*.so"), *ROOT.glob("tutorials/*.py")]
    newest = max(path.stat().st_mtime for path in package)
    stale = []
    for path in layout.tutorials:
        kept = OUTPUT / f"{Path(path).stem}.txt"
        if not kept.exists() or kept.stat().st_mtime < newest:
            stale.append(Path(path).name[:2])
    if stale:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(ROOT / "tutorials" / "run_all.py"), *stale]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            raise SystemExit("a tutorial failed: its page cannot be made")


def fence(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```\n"


def render(path: str, page: str, source: Path, with_output: bool, translate: Callable[[str], str]) -> str:
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    number = Path(path).name[:2]
    docstring = (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)
    parts = [f"# {number}. {title(text)}\n", docstring[0].partition(": ")[2] and _sentence(docstring[0])]
    parts.append(translate(docstring[1] if len(docstring) > 1 else ""))
    parts.append(f"\nThe program: [`{path}`]({_copy(path, page, source)}).\n")
    numbered, rest = sections(printed(path)) if with_output else ({}, "")
    file = os.path.relpath(ROOT / path, (source / page).parent)
    section = ""
    for kind, first, last in cells(text):
        if kind == "prose":
            heading = re.match(r"# ##+ (\d)?", lines[first - 1])
            if heading:
                parts.append(_output(numbered.pop(section, "")))
                section = heading[1] or ""
            parts.append(translate("\n".join(re.sub(r"^# ?", "", line) for line in lines[first - 1 : last])))
        else:
            parts.append(f"```{{literalinclude}} {file}\n:language: python\n:lines: {first}-{last}\n```\n")
    parts.append(_output(numbered.pop(section, "")))
    left = "\n\n".join([rest, *numbered.values()]).strip("\n")
    if left:
        parts += ["## What it prints\n", _output(left)]
    for picture in sorted((ROOT / "tutorials" / "output").glob(f"{Path(path).stem}*.png")):
        target = source / Path(page).parent / picture.name
        shutil.copyfile(picture, target)
        parts.append(f"![{title(text)}]({picture.name})\n")
    return "\n".join(parts)


def _output(text: str) -> str:
    return f"::::{{container}} printed\n{fence(text)}::::\n" if text else ""


def _sentence(line: str) -> str:
    rest = line.partition(": ")[2]
    return rest[:1].upper() + rest[1:] + "\n"


def _copy(path: str, page: str, source: Path) -> str:
    target = source / "files" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, target)
    return os.path.relpath(target, (source / page).parent)


def index(layout: Layout) -> str:
    """The page that lists them."""
    rows = []
    for path in layout.tutorials:
        text = (ROOT / path).read_text()
        page = layout.pages[path].removeprefix("tutorials/")
        rows.append(f"* [{Path(path).name[:2]}. {title(text)}](tutorials/{page}.md)")
    toctree = "\n".join(layout.pages[path] for path in layout.tutorials)
    return (
        "# Tutorials\n\nEach is a program that asserts what it prints. The pages below show the code, and what it "
        "printed when this site was made. `make tutorials` runs all of them; each one alone: `python "
        "tutorials/02_how_ddp_works.py`.\n\n" + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"
    )
