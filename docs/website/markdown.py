"""A Markdown file of the repository as a page of the site.

What changes is where links lead: to the page that shows a file, or to a copy of the file where no page does. A
link to what does not exist is an error. A file that is named in backticks, and has a page, becomes a link to it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .layout import ROOT, Layout

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
NAMED = re.compile(r"(?<![`\[\w/])`([\w./-]+\.(?:py|h|cpp|cu|cuh|md))`(?![\]`])")
FENCE = re.compile(r"^\s*(```|~~~)")
DRAWING = re.compile(r"^<!-- drawing: (\w+) -->$")
PICTURES = {".png", ".svg", ".jpg"}


class Writer:
    """Writes pages into ``source``, and copies what they link to."""

    def __init__(self, layout: Layout, source: Path, drawings: dict[str, str]):
        self.layout, self.source, self.drawings = layout, source, drawings
        self.written: set[Path] = set()

    def write(self, page: str, text: str) -> None:
        if page in self.layout.orphans:
            front = text.removeprefix("---\n") if text.startswith("---\n") else f"---\n\n{text}"
            text = f"---\norphan: true\n{front}"  # it is in no menu, and that is no mistake
        path = self.source / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.written.add(path)
        if not path.exists() or path.read_text() != text:  # Sphinx reads again what is newer
            path.write_text(text)

    def remove_others(self) -> None:
        """Pages of files that are gone."""
        for path in self.source.rglob("*.md"):
            if path not in self.written and self.source / "files" not in path.parents:
                path.unlink()

    def to(self, target: str, page: str) -> str:
        """A path from a page to a file below ``source``."""
        return os.path.relpath(target, Path(page).parent)

    def translate(self, text: str, page: str, path: str) -> str:
        """``text`` of the repository's file ``path``, for the page ``page``."""
        lines, fenced = [], False
        for line in text.splitlines():
            if FENCE.match(line):
                fenced = not fenced
            drawing = DRAWING.match(line)
            if drawing:
                lines += ["```{raw} html", self.drawings[drawing[1]], "```"]
            elif fenced or line.startswith("    "):
                lines.append(line)
            else:
                line = LINK.sub(lambda match: self._link(match, page, path), line)
                lines.append(NAMED.sub(lambda match: self._named(match, page, path), line))
        return "\n".join(lines) + "\n"

    def _named(self, match: re.Match[str], page: str, path: str) -> str:
        folder = Path(path).parent.as_posix()
        places = (folder, "csrc", "csrc/reducer", "csrc/copy", "minddp")
        for name in (match[1], *(f"{place}/{match[1]}" for place in places)):
            target = self.layout.page(os.path.normpath(name))
            if target and target != page:
                return f"[`{match[1]}`]({self.to(target, page)}.md)"
        return match[0]

    def _link(self, match: re.Match[str], page: str, path: str) -> str:
        picture, text, target = match.groups()
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0]
        name, _, anchor = target.partition("#")
        file = os.path.normpath((Path(path).parent / name).as_posix())
        if file in self.layout.pages:
            return f"{picture}[{text}]({self.to(self.layout.pages[file], page)}.md{'#' + anchor if anchor else ''})"
        if name.endswith(".md") and (self.source / page).parent.joinpath(name).exists():
            return match[0]  # from one page that is made here to another
        if file == "docs/how.html":
            return f'<a href="{self.to("index", page)}.html">{text}</a>'
        if not (ROOT / file).is_file():
            raise ValueError(f"{path}: a link to {target}, which is no file of the repository")
        copy = self.source / "files" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy)
        return f"{picture}[{text}]({self.to('files/' + file, page)})"
