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
    """The messages of the reducer and of its cases, each a function with its cause above it."""
    for file in sorted((ROOT / "csrc").rglob("errors.h")):
        yield from worded_in(file.relative_to(ROOT).as_posix(), file.read_text())


def worded_in(path: str, text: str) -> Iterator[Message]:
    for function in re.finditer(r"((?:^//.*\n)*)^inline (?:std::string|const char\*) (\w+)\(", text, re.MULTILINE):
        comment, name = function.groups()
        end = text.index("\n}", function.end())
        body = text[function.end() : end]
        begin = text.count("\n", 0, function.start(2)) + 1
        part = len(re.findall(rf"\b{name}\(", text)) > 1  # another function's message contains it
        cause = " ".join(line.lstrip("/ ").strip() for line in comment.splitlines())
        for statement in re.finditer(r"(?:if \(([^)]*)\)\s+)?return\s+(?=\"|c10::str)", body):
            value = body[statement.end() : end_of_statement(body, statement.end())]
            when = statement[1] or ""
            kind = "Part of a RuntimeError" if part else "RuntimeError"
            yield Message(kind, worded([value]), path, begin, name, cause or when.replace("cause == ", ""))


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


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


class Wording:
    """Finds the words of a message that is not written where it is raised: those of a variable, of what callers hand
    over, or of what functions of the package return."""

    def __init__(self, files: dict[str, ast.Module]):
        self._functions: dict[str, list[Function]] = {}
        self._file: dict[Function, ast.Module] = {}
        for tree in files.values():
            for function in functions_of(tree):
                self._functions.setdefault(function.name, []).append(function)
                self._file[function] = tree

    def of(self, value: ast.AST, function: Function, depth: int = 0) -> list[str]:
        """Each text that ``value`` may be, in ``function``; none where there are no words."""
        if depth > 5:
            return []
        if isinstance(value, ast.IfExp):
            return self.of(value.body, function, depth) + self.of(value.orelse, function, depth)
        if isinstance(value, ast.Name):
            return self._of_variable(value.id, function, depth + 1)
        if isinstance(value, ast.Call):
            return self._of_call(value, function, depth + 1)
        if isinstance(value, ast.BinOp) and isinstance(value.left, (ast.Name, ast.Call)):
            return [text + of_expression(value.right) for text in self.of(value.left, function, depth)]
        text = of_expression(value)
        if not has_words(text) and isinstance(value, ast.JoinedStr):
            return self._filled_in(value, function, depth + 1)
        return [text] if has_words(text) else []

    def _of_call(self, call: ast.Call, function: Function, depth: int) -> list[str]:
        name = _called(call)
        if name == "join" and call.args and isinstance(call.args[0], ast.List):
            return self.of(call.args[0].elts[0], function, depth)  # the headline
        if name == "format" and isinstance(call.func, ast.Attribute):
            return self.of(call.func.value, function, depth)
        beside = [other for other in self._functions.get(name, []) if self._file[other] is self._file[function]]
        returned = [
            (node.value, other)
            for other in beside or self._functions.get(name, [])
            for node in _own_nodes(other)
            if isinstance(node, ast.Return) and node.value is not None
        ]
        return list(dict.fromkeys(text for node, other in returned for text in self.of(node, other, depth)))

    def _of_variable(self, name: str, function: Function, depth: int) -> list[str]:
        found: list[str] = []
        for node in [*_own_nodes(function), *ast.iter_child_nodes(self._file[function])]:
            if isinstance(node, ast.Assign) and _is_named(node.targets[0], name):
                found += self.of(node.value, function, depth)
            elif isinstance(node, ast.NamedExpr) and _is_named(node.target, name):
                found += self.of(node.value, function, depth)
            elif isinstance(node, ast.AugAssign) and _is_named(node.target, name) and found:
                found[-1] += of_expression(node.value)
        return found or self._handed_over(name, function, depth)

    def _handed_over(self, name: str, function: Function, depth: int) -> list[str]:
        """What callers in the same file give for a parameter."""
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        if name not in names:
            return []
        found = []
        for caller in functions_of(self._file[function]):
            for node in _own_nodes(caller):
                if isinstance(node, ast.Call) and _called(node) == function.name:
                    given = dict(zip(names, node.args)) | {word.arg: word.value for word in node.keywords}
                    if name in given:
                        found += self.of(given[name], caller, depth)
        return found

    def _filled_in(self, value: ast.JoinedStr, function: Function, depth: int) -> list[str]:
        """A text that consists of others."""
        texts = [""]
        for part in value.values:
            words = self.of(part.value, function, depth) if isinstance(part, ast.FormattedValue) else []
            texts = [text + word for text in texts for word in words or [of_expression(part)]]
        return [text for text in texts if has_words(text)]


def _called(value: ast.AST) -> str:
    """The name of the function that a call is of."""
    if not isinstance(value, ast.Call):
        return ""
    return value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")


def _is_named(target: ast.AST, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def has_words(text: str) -> bool:
    return len(re.findall(r"\b[a-z]{2,}\b", re.sub("‹[^›]*›", "", text))) > 1


def python_files() -> dict[str, ast.Module]:
    files = sorted((ROOT / "minddp").rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}


def raises(function: Function) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Where ``function`` raises an exception that it has made, and how that is made."""
    made = {
        target.id: node.value
        for node in _own_nodes(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in _own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = made.get(node.exc.id) if isinstance(node.exc, ast.Name) else node.exc
            if isinstance(call, ast.Call) and call.args:
                yield node, call
        elif isinstance(node, ast.Return):
            call = made.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
            if isinstance(call, ast.Call) and call.args and _called(call).endswith(("Error", "LostPeer")):
                yield node, call  # for somebody else to raise


def raised_in_python(unknown: list[str] | None = None) -> Iterator[Message]:
    """``unknown`` is filled with what is raised in words that are not found."""
    files = python_files()
    wording = Wording(files)
    for path, tree in files.items():
        for function in functions_of(tree):
            for node, call in raises(function):
                # Python's own errors of the system have a number before their words.
                texts = wording.of(call.args[1 if _kind(call) == "OSError" and len(call.args) > 1 else 0], function)
                yield from (Message(_kind(call), text, path, node.lineno, function.name) for text in texts)
                if not texts and unknown is not None:
                    unknown.append(f"{path}: {ast.unparse(call)}")


def _kind(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    return name if name[0].isupper() or "." in name else "RuntimeError"


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
