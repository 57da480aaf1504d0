"""A source file as a page: each comment beside the code that it stands above.

The page holds no copy of the code: rows of ``literalinclude`` name the lines of the file itself.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from .layout import ROOT, Layout, core_in_reading_order

CPP_COMMENT = re.compile(r"\s*//( ?)(.*)$")
# A function that is defined at the left margin, such as `void Reducer::launch(size_t index) {`.
CPP_FUNCTION = re.compile(r"^(?:[\w:<>,&*~\[\] ]+[ &*])?((?:\w+::)*~?\w+)\((?!.*;\s*$)")
CPP_TYPE = re.compile(r"^(?:class|struct|enum class) (\w+)(?!.*;\s*$)")


@dataclass
class Row:
    """A note, and the lines of code that follow it; line numbers count from 1, ends are included."""

    note: list[str] = field(default_factory=list)
    first: int = 0
    last: int = 0
    title: str = ""
    raw: bool = False  # the note is shown as it stands


# --- C++ ---------------------------------------------------------------------------------------------


def cpp_rows(text: str) -> list[Row]:
    rows, row = [], Row()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        comment = CPP_COMMENT.match(line)
        name = _cpp_name(line)
        if comment or (name and row.first):
            if row.first:
                rows.append(row)
                row = Row()
        if comment:
            row.note.append(comment[2])
            continue
        if name:
            row.title = row.title or name
        if line.strip() or row.first:
            row.first = row.first or number
            row.last = number if line.strip() else row.last
    rows = rows + [row] if row.first or row.note else rows
    if rows and rows[0].note:  # what a file opens with stands above its code, over the whole width
        head = rows[0]
        rows[:1] = [Row(head.note), Row([], head.first, head.last, head.title)]
    return rows


def _cpp_name(line: str) -> str:
    if not line or not line[0].isalpha() or line.startswith(("namespace", "using", "template", "return", "TORCH_")):
        return ""
    found = CPP_TYPE.match(line) or CPP_FUNCTION.match(line)
    return found[1] if found else ""


# --- Python --------------------------------------------------------------------------------------------


def python_rows(text: str) -> list[Row]:
    """Functions, classes and methods, each with its docstring; comments above them or inside begin rows, too."""
    lines = text.splitlines()
    tree = ast.parse(text)
    notes: dict[int, tuple[int, list[str]]] = {}  # first line of a note -> its last, its text
    titles: dict[int, str] = {}
    _python_notes(tree, "", notes, titles)
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*#", line) and not any(first <= number <= last for first, (last, _) in notes.items()):
            notes[number] = (number, [re.sub(r"^\s*# ?", "", line)])
    rows, row, number = [], Row(), 1
    docstring_of = {first for first, (_, text) in notes.items() if not lines[first - 1].strip().startswith("#")}
    while number <= len(lines):
        if number in titles and row.first:
            rows.append(row)
            row = Row()
        if number in titles:
            row.title = titles[number]
        if number in notes:
            last, note = notes[number]
            if number in docstring_of:  # of the function above: its signature is the row's code already
                row.note += note
                row.raw = any(re.match(r"\s{2,}\S", line) for line in note)
                if number == 1:
                    rows.append(row)
                    row = Row()
                elif row.first:
                    rows.append(Row(row.note, row.first, row.last, row.title, row.raw))
                    row = Row()
            else:
                if row.first:
                    rows.append(row)
                    row = Row()
                row.note += note
            number = last + 1
            continue
        line = lines[number - 1]
        if line.strip():
            row.first = row.first or number
            row.last = number
        number += 1
    return rows + [row] if row.first or row.note else rows


def _python_notes(node: ast.AST, owner: str, notes: dict, titles: dict) -> None:
    body = getattr(node, "body", [])
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    text = ast.get_docstring(node) if documented else None
    if text:
        notes[body[0].lineno] = (body[0].end_lineno, text.splitlines())
    for child in body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{owner}{child.name}"
            first = min([child.lineno, *[decorator.lineno for decorator in child.decorator_list]])
            if not isinstance(node, ast.FunctionDef):
                titles[first] = name
            _python_notes(child, f"{name}." if isinstance(child, ast.ClassDef) else "", notes, titles)


# --- a page ------------------------------------------------------------------------------------------------


def prose(lines: list[str]) -> str:
    """Comment lines as Markdown: indented paragraphs as they stand, characters that Markdown would take escaped."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch(r"\s*[-=]{3,}\s*", line):
            continue  # a rule between parts of a file
        line = re.sub(r"^-{3,} (.*?) -{3,}$", r"\1", line)
        if re.match(r"-{3,} \w", line):
            continue  # the name of what follows, up to the next such line
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs if paragraph)


def _paragraph(lines: list[str]) -> str:
    if any(re.match(r"\s+[*-] ", line) for line in lines):
        return _escape("\n".join(_item(line) for line in lines))
    if all(line.startswith("  ") for line in lines):
        return "```text\n" + "\n".join(line[2:] for line in lines) + "\n```"
    body = [line for line in lines if line.startswith("  ")]
    if body and lines[0] == lines[0].lstrip() and all(line.startswith(" ") for line in lines[1:]):
        return _escape(lines[0]) + "\n\n```text\n" + "\n".join(line[1:] for line in lines[1:]) + "\n```"
    return _escape("\n".join(line.strip() for line in lines))


def _item(line: str) -> str:
    """A line of a list: what goes on from the line above is indented as Markdown wants it."""
    item = re.match(r"\s+[*-] (.*)", line)
    return f"* {item[1]}" if item else f"  {line.strip()}" if line.startswith(" ") else f"{line}\n"


def _escape(text: str) -> str:
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for index in range(0, len(parts), 2):
        part = re.sub(r":(?:class|meth|func|mod|data|exc|attr):$", "", parts[index])
        part = re.sub(r"(?m)^(\s*)(#|>|\+ |- |\d+\.)", r"\1\\\2", part)
        part = re.sub(r"(?<!\n)(?<!^)\*", r"\\*", part)
        parts[index] = re.sub(r"([<\[\]_$])", r"\\\1", part)
    return "".join(parts)


def render(path: str, page: str, layout: Layout, source: Path) -> str:
    """The page's Markdown."""
    text = (ROOT / path).read_text()
    is_python = path.endswith(".py")
    rows = python_rows(text) if is_python else cpp_rows(text)
    order = layout.python if is_python else layout.cpp
    head = f"---\nhide-toc: false\nhtml_theme.sidebar_secondary.remove: true\n---\n\n# `{path}`\n\n"
    body = [head, _neighbours(order, path, page, layout)]
    file = os.path.relpath(ROOT / path, (source / page).parent)
    for row in rows:
        note = ("```text\n" + "\n".join(row.note) + "\n```" if row.raw else prose(row.note)) if row.note else ""
        if not (note or row.first):
            continue
        if row.title:
            body.append(f"## `{row.title}`\n")
        if not row.first:
            body.append(f":::::{{container}} overview\n\n{note}\n:::::\n")
            continue
        code = (
            f"```{{literalinclude}} {file}\n:language: {'python' if is_python else 'cpp'}\n"
            f":lines: {row.first}-{row.last}\n:lineno-match:\n```"
        )
        beside = f"::::{{container}} note\n\n{note}\n::::\n" if note else ""
        body.append(f":::::{{container}} beside\n{beside}::::{{container}} code\n{code}\n::::\n:::::\n")
    return "\n".join(body)


def first_sentence(path: str) -> str:
    """What a file says of itself first, as Markdown; "" where it begins with code."""
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    else:
        begin = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
        lines = [line.removeprefix("//").strip() for line in begin]
    paragraph = " ".join(itertools.takewhile(str.strip, lines))
    return _escape(re.split(r"(?<=[.?])\s", paragraph)[0])


def _neighbours(order: list[str], path: str, page: str, layout: Layout) -> str:
    place = order.index(path)
    parts = []
    for label, index in (("Before it", place - 1), ("Next", place + 1)):
        if 0 <= index < len(order):
            target = os.path.relpath(layout.pages[order[index]], Path(page).parent)
            parts.append(f"{label}: [`{order[index]}`]({target}.md)")
    core = core_in_reading_order()
    here = f"File {core.index(path) + 1} of {len(core)} of the core" if path in core else "Beside the core"
    here = here if path.startswith("csrc/") else f"File {place + 1} of {len(order)}"
    return f"{here}, in reading order. " + ". ".join(parts) + f".\n{_where_to_begin(path, page)}"


def _where_to_begin(path: str, page: str) -> str:
    """What csrc/README.md says of a file that is not read from its head; "" for the others."""
    text = (ROOT / "csrc" / "README.md").read_text()
    row = re.search(rf"\| `{path.rpartition('/')[2]}` \|.* (Read from .*?) \|\n", text)
    if row is None or path not in core_in_reading_order():
        return ""
    reading = os.path.relpath("reading", Path(page).parent)
    return f"\n**Where to begin.** {row[1]}: [one gradient's way]({reading}.md) has the steps.\n"
