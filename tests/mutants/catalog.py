"""The list of faults: what is replaced by what, and which tests notice."""

from __future__ import annotations

import ast
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Mutant", "batches", "load", "planted", "problems", "with_switches"]

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        id: its name.
        fault: what is wrong with it, in words.
        file: where it is planted, from the repository's root.
        text: what stands there, exactly once.
        becomes: what stands there instead.
        tests: pytest node ids; one of them fails.
        switch: of C++: ``"statement"`` or ``"expression"`` where both texts are such, so that a build with many
            mutants can hold both and choose at run time; None: the mutant needs a build of its own.
    """

    id: str
    fault: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    switch: str | None = None

    @property
    def is_cpp(self) -> bool:
        return self.file.startswith("csrc/")


def load(path: Path = LIST) -> list[Mutant]:
    """The mutants in the order of the file."""
    document = tomllib.loads(path.read_text())
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in document["mutant"]]


def planted(mutant: Mutant, source: str) -> str:
    """``source`` with the fault.

    Raises:
        ValueError: its text does not stand there exactly once.
    """
    count = source.count(mutant.text)
    if count != 1:
        raise ValueError(f"{mutant.id}: its text stands {count} times in {mutant.file}, not once: {mutant.text!r}")
    return source.replace(mutant.text, mutant.becomes)


def with_switches(mutants: list[Mutant], source: str) -> str:
    """``source`` with all of ``mutants``, of one file, each asleep until ``MINDDP_MUTANT`` is its id."""
    edits = []
    for mutant in mutants:
        planted(mutant, source)
        asked = f'minddp_mutant("{mutant.id}")'
        if mutant.switch == "statement":
            both = f"{{ if ({asked}) {{ {mutant.becomes} }} else {{ {mutant.text} }} }}"
        else:
            both = f"({asked} ? ({mutant.becomes}) : ({mutant.text}))"
        edits.append((source.index(mutant.text), mutant.text, both))
    for begin, text, both in sorted(edits, reverse=True):
        source = source[:begin] + both + source[begin + len(text) :]
    return source


def batches(mutants: list[Mutant], root: Path = ROOT) -> list[list[Mutant]]:
    """``mutants`` of C++ in builds: those with a switch together, as far as their texts do not overlap."""
    filling: list[tuple[list[Mutant], list[tuple[str, int, int]]]] = []
    alone = []
    for mutant in mutants:
        if mutant.switch is None:
            alone.append([mutant])
            continue
        begin = (root / mutant.file).read_text().index(mutant.text)
        span = (mutant.file, begin, begin + len(mutant.text))
        for batch, spans in filling:
            if not any(file == span[0] and low < span[2] and span[1] < high for file, low, high in spans):
                batch.append(mutant)
                spans.append(span)
                break
        else:
            filling.append(([mutant], [span]))
    return [batch for batch, _ in filling] + alone


def problems(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """What keeps the list from being run against the present sources; empty where nothing does."""
    found = [f"{m.id}: stands twice" for i, m in enumerate(mutants) if m.id in {other.id for other in mutants[:i]}]
    for mutant in mutants:
        if mutant.text == mutant.becomes:
            found.append(f"{mutant.id}: changes nothing")
        if mutant.switch not in (None, "statement", "expression"):
            found.append(f"{mutant.id}: switch is {mutant.switch!r}")
        if not mutant.tests:
            found.append(f"{mutant.id}: no test is to catch it")
        try:
            planted(mutant, (root / mutant.file).read_text())
        except (OSError, ValueError) as error:
            found.append(str(error))
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        if reason := _missing(test, root):
            found.append(f"{test}: {reason}")
    return found


@functools.cache
def _functions(file: Path) -> tuple[str, set[str]]:
    source = file.read_text()
    return source, {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def _missing(test: str, root: Path) -> str | None:
    """Why a node id names nothing. Reads the file; of parameters only names that stand in it."""
    file, _, rest = test.partition("::")
    name, bracket, parameter = rest.partition("[")
    if not (root / file).is_file():
        return "no such file"
    source, functions = _functions(root / file)
    if name not in functions:
        return "no such test"
    words = [word for word in parameter.rstrip("]").split("-") if word.isidentifier()] if bracket else []
    absent = [word for word in words if word not in source and word.rstrip("0123456789") not in source]
    return f"no parameter {absent[0]!r}" if absent else None
