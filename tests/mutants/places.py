"""Where a fault is planted: a place that has a name, and what stands in it, found by syntax and not by text.

A place of Python is a module, a class or a function: ``Engine.step``. One of C++ is a class or a function, and ``::``
stands before or in its name: ``Reducer::launch``, ``::exchange_memory``. As much of the qualified name as is needed
says which, whatever file it is in.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

__all__ = ["Place", "Sources", "Spot", "is_expression", "same"]


@dataclass(frozen=True)
class Spot:
    """A part of a file, from one offset to another."""

    file: str
    begin: int
    end: int

    def overlaps(self, other: Spot) -> bool:
        return self.file == other.file and self.begin < other.end and other.begin < self.end

    def holds(self, other: Spot) -> bool:
        return self.file == other.file and self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Place:
    """A named part of the sources: its qualified name, and what it consists of."""

    name: str
    spot: Spot
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None = None  # of C++: None


class Sources:
    """What stands in a copy of the repository; read once.

    Args:
        root: of the copy.
    """

    def __init__(self, root: Path):
        self._root = root
        self.python = [place for file in sorted(root.glob("minddp/**/*.py")) for place in _of_python(root, file)]
        self.cpp = [
            place
            for file in sorted(root.glob("csrc/**/*"))
            if file.suffix in (".h", ".cpp", ".cu", ".cuh")
            for place in _of_cpp(root, file)
        ]

    def all(self, name: str) -> list[Place]:
        """Every place of the language in which ``name`` is written."""
        return self.cpp if "::" in name else self.python

    def files(self, name: str) -> list[Place]:
        """The whole files of that language."""
        return [place for place in self.all(name) if place.spot.begin == 0]

    def named(self, name: str) -> list[Place]:
        """The places with this name, or with one that ends so."""
        separator = "::" if "::" in name else "."
        wanted = separator + name.removeprefix(separator)
        return [place for place in self.all(name) if (separator + place.name).endswith(wanted)]

    def find(self, places: Sequence[Place], text: str) -> list[Spot]:
        """Where ``text`` stands in ``places``: in Python an expression or statements, in C++ a run of tokens.

        Raises:
            SyntaxError: it is no Python.
        """
        found = {spot for place in places for spot in (self._in_python if place.node else self._in_cpp)(place, text)}
        return sorted(found, key=lambda spot: (spot.file, spot.begin))

    def innermost(self, spot: Spot) -> Place:
        """The smallest place around ``spot``."""
        around = [place for place in [*self.python, *self.cpp] if place.spot.holds(spot)]
        return min(around, key=lambda place: place.spot.end - place.spot.begin)

    def text(self, file: str) -> str:
        return _read(self._root / file)

    def line(self, spot: Spot) -> str:
        """The file and the line, as compilers write it."""
        return f"{spot.file}:{self.text(spot.file).count(chr(10), 0, spot.begin) + 1}"

    def nearest(self, places: Sequence[Place], text: str) -> str:
        """The line of ``places`` that is most like ``text``, and where it stands."""
        matcher, best, found = difflib.SequenceMatcher(None, "", text.strip().splitlines()[0]), 0.0, "nothing"
        for spot in {place.spot for place in places}:
            offset = spot.begin
            for line in self.text(spot.file)[spot.begin : spot.end].splitlines(keepends=True):
                matcher.set_seq1(line.strip())
                if matcher.quick_ratio() > best and matcher.ratio() > best:
                    at = Spot(spot.file, offset, offset + len(line))
                    best, found = matcher.ratio(), f"{line.strip()!r} ({self.innermost(at).name}, {self.line(at)})"
                offset += len(line)
        return found

    # --- matching ---

    def _in_python(self, place: Place, text: str) -> Iterator[Spot]:
        assert place.node is not None
        wanted = _parsed(text)
        starts = _starts(self._root / place.spot.file)
        for nodes in _runs(place.node, wanted):
            yield Spot(place.spot.file, _offset(starts, nodes[0])[0], _offset(starts, nodes[-1])[1])

    def _in_cpp(self, place: Place, text: str) -> Iterator[Spot]:
        wanted = [token for token, _, _ in _tokens(text)]
        begin, end = place.spot.begin, place.spot.end
        tokens = [each for each in _file_tokens(self._root / place.spot.file) if begin <= each[1] and each[2] <= end]
        texts = [token for token, _, _ in tokens]
        for i in range(len(texts) - len(wanted) + 1):
            if texts[i : i + len(wanted)] == wanted:
                yield Spot(place.spot.file, tokens[i][1], tokens[i + len(wanted) - 1][2])


@functools.cache
def _read(path: Path) -> str:
    return path.read_text()


# --- Python ---


def _of_python(root: Path, path: Path) -> Iterator[Place]:
    file, starts = str(path.relative_to(root)), _starts(path)
    module = ast.parse(_read(path))
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield Place(name, Spot(file, 0, len(_read(path))), module)
    pending: list[tuple[str, ast.AST]] = [(name, module)]
    while pending:
        outer, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{outer}.{child.name}"
                yield Place(inner, Spot(file, *_offset(starts, child)), child)
                pending.append((inner, child))
            else:
                pending.append((outer, child))


@functools.cache
def _starts(path: Path) -> list[tuple[int, bytes]]:
    """Of each line where it begins, and its bytes: ``ast`` counts those."""
    starts, offset = [], 0
    for line in _read(path).splitlines(keepends=True):
        starts.append((offset, line.encode()))
        offset += len(line)
    return starts


def _offset(starts: list[tuple[int, bytes]], node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None
    (begin, first), (end, last) = starts[node.lineno - 1], starts[node.end_lineno - 1]
    return begin + len(first[: node.col_offset].decode()), end + len(last[: node.end_col_offset].decode())


def is_expression(text: str) -> bool:
    """Of Python."""
    try:
        ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return True


def same(one: str, other: str, *, is_cpp: bool) -> bool:
    """Whether they differ in form alone."""
    if is_cpp:
        return [token for token, _, _ in _tokens(one)] == [token for token, _, _ in _tokens(other)]
    return _parsed(one) == _parsed(other)


@functools.cache
def _parsed(text: str) -> tuple[str, ...]:
    """The dump of an expression, or of each statement."""
    try:
        return (_dump(ast.parse(text.strip(), mode="eval").body),)
    except SyntaxError:
        return tuple(map(_dump, ast.parse(dedent(text).strip()).body))


@functools.cache
def _dump(node: ast.AST) -> str:
    return ast.dump(node)


def _runs(root: ast.AST, wanted: tuple[str, ...]) -> Iterator[Sequence[ast.AST]]:
    """The expressions, and the runs of statements, that are ``wanted``."""
    pending = [root]
    while pending:
        node = pending.pop()
        for _, value in ast.iter_fields(node):
            children = [
                child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
            ]
            for i in range(len(children) - len(wanted) + 1):
                run = children[i : i + len(wanted)]
                if isinstance(run[0], ast.expr | ast.stmt) and tuple(map(_dump, run)) == wanted:
                    yield run
            if not isinstance(node, ast.JoinedStr):  # before 3.12, what is in an f-string has no place of its own
                pending += children


# --- C++ ---

Token = tuple[str, int, int]

_CPP = re.compile(
    r"""(?P<none>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*)
    |R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+'|[A-Za-z_]\w*|\.?\d(?:[\w.']|[eE][+-])*|::|.
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_CLOSES = {"(": ")", "{": "}"}
_NO_NAMES = {"__attribute__", "__launch_bounds__", "decltype", "alignas", "explicit", "noexcept", "requires"}


def _tokens(text: str) -> list[Token]:
    """What the compiler sees: without comments, white space and lines of the preprocessor."""
    return [(each.group(), each.start(), each.end()) for each in _CPP.finditer(text) if each["none"] is None]


@functools.cache
def _file_tokens(path: Path) -> list[Token]:
    return _tokens(_read(path))


def _of_cpp(root: Path, path: Path) -> Iterator[Place]:
    """The classes and the functions with a body. Enough of a parser for this code, not for all of C++."""
    file, tokens = str(path.relative_to(root)), _file_tokens(path)
    yield Place("", Spot(file, 0, len(_read(path))))
    texts = [token for token, _, _ in tokens]
    scopes: list[tuple[str, int]] = []
    head = i = 0  # where the declaration begins, and how far it is read
    while i < len(tokens):
        if texts[i] in ";}":
            if texts[i] == "}":
                yield _place(file, tokens, scopes, scopes[-1][1], i)
                scopes.pop()
            head = i + 1
        elif texts[i] == "(":
            i = _end(texts, i)
        elif texts[i] == "{":
            kind, name = _opened(texts[head:i])
            if kind == "scope":
                scopes.append((name, head))
                head = i + 1
            else:
                i = _end(texts, i)
                if kind == "function":
                    yield _place(file, tokens, [*scopes, (name, head)], head, i)
                    head = i + 1
        i += 1


def _place(file: str, tokens: list[Token], scopes: Sequence[tuple[str, int]], first: int, last: int) -> Place:
    return Place("::".join(name for name, _ in scopes if name), Spot(file, tokens[first][1], tokens[last][2]))


def _end(texts: list[str], begin: int) -> int:
    """Where what opens at ``begin`` closes."""
    depth, opens, closes = 0, texts[begin], _CLOSES[texts[begin]]
    for i in range(begin, len(texts)):
        depth += (texts[i] == opens) - (texts[i] == closes)
        if depth == 0:
            return i
    raise ValueError(f"{opens} is not closed")


def _opened(head: list[str]) -> tuple[str, str]:
    """What a brace opens after ``head``, and its name: a "scope", a "function" or a "value"."""
    while head[1:2] == [":"]:  # public:
        head = head[2:]
    head = _without_angles(head)
    while head[:1] in (["template"], ["inline"]):
        head = head[1:]
    if head[:1] and head[0] in ("namespace", "class", "struct", "union", "enum", "extern"):
        return "scope", _scope_name(head[1:])
    i = 0
    while i < len(head):
        if head[i] == "(":
            if head[i - 1] not in _NO_NAMES:
                break
            i = _end(head, i)
        elif head[i] == "=" and head[i - 1] != "operator":
            return "value", ""
        i += 1
    else:
        return "value", ""
    rest = head[_end(head, i) + 1 :]
    if ":" in rest and rest[-1].isidentifier():  # of a constructor's list
        return "value", ""
    return "function", _function_name(head[:i])


def _without_angles(head: list[str]) -> list[str]:
    """``head`` without the arguments of templates before its first parenthesis."""
    depth, plain = 0, []
    for i, token in enumerate(head):
        if token == "(" and depth == 0 and head[i - 1] not in _NO_NAMES:
            return plain + head[i:]
        depth += token == "<" and head[i - 1] != "operator"
        plain += [token] if depth == 0 else []
        depth -= token == ">" and depth > 0
    return plain


def _scope_name(head: list[str]) -> str:
    if head[:1] == ["alignas"]:
        head = head[_end(head, 1) + 1 :]
    name = ""
    for token in head:
        if not (token.isidentifier() or token == "::") or token == "final":
            break
        name += token
    return name.removeprefix("class").removeprefix("struct")


def _function_name(head: list[str]) -> str:
    if "operator" in head:
        return "".join(head[head.index("operator") :])
    name = head[-1]
    while len(head) > 2 and head[-2] in ("~", "::"):
        if head[-2] == "~":
            name, head = f"~{name}", [*head[:-2], head[-1]]
        else:
            name, head = f"{head[-3]}::{name}", head[:-2]
    return name
