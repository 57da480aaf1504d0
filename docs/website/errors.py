"""Every message that the sources can raise, as they word it; what is filled in when it happens stands in ‹…›."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .layout import ROOT, Layout

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Message:
    kind: str  # the exception's class
    text: str
    path: str
    line: int
    where: str  # the function
    cause: str = ""  # what the source's comment says above it


# --- C++ -------------------------------------------------------------------------------------------------


def closing(text: str, begin: int) -> int:
    """Where the parenthesis that opens at ``begin`` closes."""
    depth, index = 0, begin
    while index < len(text):
        literal = LITERAL.match(text, index)
        if literal:
            index = literal.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
        index += 1
    raise ValueError(f"no end of: {text[begin : begin + 60]!r}")


def end_of_statement(text: str, begin: int) -> int:
    index = begin
    while text[index] != ";":
        literal = LITERAL.match(text, index)
        index = literal.end() if literal else index + 1
    return index


def arguments(text: str) -> list[str]:
    """The arguments of a call, whose text stands between its parentheses."""
    parts, begin, index, depth = [], 0, 0, 0
    while index < len(text):
        literal = LITERAL.match(text, index)
        if literal:
            index = literal.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[index], 0)
        if text[index] == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
        index += 1
    return [part.strip() for part in [*parts, text[begin:]]]


def worded(parts: list[str]) -> str:
    words = []
    for part in parts:
        nested = re.match(r"(?:c10|minddp)?(?:::)?str\(", part)
        if nested:
            words.append(worded(arguments(part[nested.end() : closing(part, nested.end() - 1)])))
        elif LITERAL.match(part):
            words.append("".join(literal.encode().decode("unicode_escape") for literal in LITERAL.findall(part)))
        else:
            words.append(f"‹{' '.join(part.split())}›")
    return "".join(words)


def worded_in_errors_h() -> Iterator[Message]:
    """The reducer's messages, each a function with its cause above it."""
    path = next((ROOT / "csrc").rglob("errors.h")).relative_to(ROOT).as_posix()
    text = (ROOT / path).read_text()
    for function in re.finditer(r"((?:^//.*\n)*)^inline (?:std::string|const char\*) (\w+)\(", text, re.MULTILINE):
        comment, name = function.groups()
        end = text.index("\n}", function.end())
        body = text[function.end() : end]
        begin = text.count("\n", 0, function.start(2)) + 1
        cause = " ".join(line.lstrip("/ ").strip() for line in comment.splitlines())
        for statement in re.finditer(r"(?:if \(([^)]*)\)\s+)?return\s+(?=\"|c10::str)", body):
            value = body[statement.end() : end_of_statement(body, statement.end())]
            when = statement[1] or ""
            yield Message("RuntimeError", worded([value]), path, begin, name, cause or when.replace("cause == ", ""))


def raised_in_cpp() -> Iterator[Message]:
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh") or file.name == "errors.h":
            continue
        text, path = file.read_text(), file.relative_to(ROOT).as_posix()
        for call in re.finditer(r"\bTORCH_CHECK(_\w+)?\(", text):
            parts = arguments(text[call.end() : closing(text, call.end() - 1)])[1:]
            kind = {"_VALUE": "ValueError", "_TYPE": "TypeError", "_NOT_IMPLEMENTED": "NotImplementedError"}
            if any(LITERAL.search(part) for part in parts):
                line = text.count("\n", 0, call.start()) + 1
                yield Message(kind.get(call[1] or "", "RuntimeError"), worded(parts), path, line, "")


# --- Python ------------------------------------------------------------------------------------------------


def of_expression(value: ast.AST) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(of_expression(part) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return f"‹{ast.unparse(value.value)}›"
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return of_expression(value.left) + of_expression(value.right)
    return f"‹{ast.unparse(value)}›"


def raised_in_python() -> Iterator[Message]:
    for file in sorted((ROOT / "minddp").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in _own_nodes(function):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                    continue
                kind, text = ast.unparse(node.exc.func), of_expression(node.exc.args[0])
                if re.search(r"[a-z]{2,} [a-z]{2,}", re.sub("‹[^›]*›", "", text)):
                    yield Message(kind, text, path, node.lineno, function.name)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _own_nodes(child)


# --- the page -----------------------------------------------------------------------------------------------


def every_message() -> list[Message]:
    return [*worded_in_errors_h(), *raised_in_cpp(), *raised_in_python()]


def fenced(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in f"```text\n{text}\n```".splitlines())


def page(layout: Layout) -> str:
    """All messages, file by file: the reducer's first, since a training run meets these."""
    messages = every_message()
    parts = [
        "# Every error message\n",
        f"{len(messages)} messages, read from the sources when this page was made. What is filled in when it happens "
        "stands in ‹…›. Look for a few words of yours. [Troubleshooting](troubleshooting.md) begins with what you "
        "see instead.\n",
    ]
    files = list(dict.fromkeys(message.path for message in messages))
    for path in files:
        parts.append(f"## {path}\n")
        parts.append(f"Raised in [`{path}`]({layout.pages[path]}.md).\n")
        for message in messages:
            if message.path == path:
                where = f"`{message.where}`, " if message.where else ""
                cause = f" {message.cause}" if message.cause else ""
                text = message.text.strip("\n")
                parts.append(f"* **{message.kind}**, {where}line {message.line}.{_plain(cause)}\n\n{fenced(text)}\n")
    return "\n".join(parts)


def _plain(text: str) -> str:
    return re.sub(r"([<\[\]_*])", r"\\\1", text)


if __name__ == "__main__":
    print("\n".join(f"{Path(m.path).name}:{m.line} {m.kind}: {m.text}" for m in every_message()))
