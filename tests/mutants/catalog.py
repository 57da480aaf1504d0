"""The list of faults: what is replaced by what, and which tests notice."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from .places import Sources, Spot, is_expression, same

__all__ = ["ROOT", "Mutant", "batches", "follow", "load", "planted", "problems", "spot_of", "with_switches"]

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        id: its name.
        fault: what is wrong with it, in words.
        at: the place in which it is planted: ``Engine.step``, ``Reducer::launch``, see ``places.py``.
        text: what stands there, exactly once. Formatting and comments do not matter.
        becomes: what stands there instead; in Python nothing is ``pass``.
        tests: pytest node ids; one of them fails.
        alone: of C++: a build of its own, in place of one for many mutants that are chosen at run time.
    """

    id: str
    fault: str
    at: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    alone: bool = False

    @property
    def is_cpp(self) -> bool:
        return "::" in self.at


def load(path: Path = LIST) -> list[Mutant]:
    """The mutants in the order of the file."""
    document = tomllib.loads(path.read_text())
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in document["mutant"]]


def spot_of(mutant: Mutant, sources: Sources) -> Spot:
    """Where it is planted.

    Raises:
        ValueError: its text does not stand there exactly once; says where it stands, or what is nearest.
    """
    places = sources.named(mutant.at)
    try:
        spots = sources.find(places, mutant.text)
    except SyntaxError as error:
        raise ValueError(f"{mutant.id}: its text is no Python: {error}") from None
    if not spots:
        wrong = f"{mutant.text!r} does not stand in {mutant.at}" if places else f"there is no {mutant.at}"
        if names := _holders(mutant, sources):
            raise ValueError(f"{mutant.id}: {wrong}; it stands in {', '.join(names)}")
        nearest = sources.nearest(places or sources.files(mutant.at), mutant.text)
        raise ValueError(f"{mutant.id}: {wrong}; nearest: {nearest}")
    if len(spots) > 1:
        lines = ", ".join(map(sources.line, spots))
        raise ValueError(f"{mutant.id}: {mutant.text!r} stands {len(spots)} times in {mutant.at}: {lines}")
    return spots[0]


def _holders(mutant: Mutant, sources: Sources) -> list[str]:
    """The innermost places in which the text stands."""
    spots = sources.find(sources.files(mutant.at), mutant.text)
    return sorted({_short(sources.innermost(spot).name, mutant.at) for spot in spots})


def _short(name: str, like: str) -> str:
    """The end of a qualified name, of as many parts as ``like``."""
    separator = "::" if "::" in like else "."
    short = separator.join(name.split(separator)[-len(like.split(separator)) :])
    return short if separator in short or separator == "." else separator + short


def planted(mutant: Mutant, spot: Spot, source: str) -> str:
    """``source``, of the spot's file, with the fault."""
    becomes = mutant.becomes.strip()
    if not mutant.is_cpp and is_expression(mutant.text) and is_expression(becomes):
        becomes = f"({becomes})"
    elif not mutant.is_cpp:
        column = spot.begin - (source.rfind("\n", 0, spot.begin) + 1)
        becomes = dedent(mutant.becomes).strip().replace("\n", "\n" + " " * column)
    return source[: spot.begin] + becomes + source[spot.end :]


def with_switches(mutants: Sequence[tuple[Mutant, Spot]], source: str) -> str:
    """``source`` with all of ``mutants``, of one file, each asleep until ``MINDDP_MUTANT`` is its id.

    What ends with a semicolon or a brace is statements, anything else an expression.
    """
    for mutant, spot in sorted(mutants, key=lambda each: each[1].begin, reverse=True):
        asked, text = f'minddp_mutant("{mutant.id}")', source[spot.begin : spot.end]
        if text.endswith((";", "}")):
            both = f"{{ if ({asked}) {{ {mutant.becomes} }} else {{ {text} }} }}"
        else:
            both = f"({asked} ? ({mutant.becomes}) : ({text}))"
        source = source[: spot.begin] + both + source[spot.end :]
    return source


def batches(mutants: Sequence[tuple[Mutant, Spot]]) -> list[list[tuple[Mutant, Spot]]]:
    """``mutants`` of C++ in builds: together as far as their spots do not overlap."""
    filling: list[list[tuple[Mutant, Spot]]] = []
    alone = []
    for mutant, spot in mutants:
        if mutant.alone:
            alone.append([(mutant, spot)])
            continue
        for batch in filling:
            if not any(theirs.overlaps(spot) for _, theirs in batch):
                batch.append((mutant, spot))
                break
        else:
            filling.append([(mutant, spot)])
    return filling + alone


def problems(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """What keeps the list from being run against the present sources; empty where nothing does."""
    sources = Sources(root)
    found = [f"{m.id}: stands twice" for i, m in enumerate(mutants) if m.id in {other.id for other in mutants[:i]}]
    for mutant in mutants:
        if not mutant.tests:
            found.append(f"{mutant.id}: no test is to catch it")
        try:
            spot_of(mutant, sources)
            if same(mutant.text, mutant.becomes, is_cpp=mutant.is_cpp):
                found.append(f"{mutant.id}: changes nothing")
        except ValueError as error:
            found.append(str(error))
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        if reason := _missing(test, root):
            found.append(f"{test}: {reason}")
    return found


def follow(path: Path = LIST, root: Path = ROOT) -> list[str]:
    """Writes the new name of each place into the list where a text has moved and stands in one other place only."""
    sources, document, moved = Sources(root), path.read_text(), []
    for mutant in load(path):
        try:
            spot_of(mutant, sources)
        except ValueError:
            if len(names := _holders(mutant, sources)) == 1:
                entry = re.compile(rf'(id = "{re.escape(mutant.id)}"\n(?:(?!\[\[).*\n)*?at = ").*(?="\n)')
                document = entry.sub(lambda match, name=names[0]: match[1] + name, document)
                moved.append(f"{mutant.id}: {mutant.at} is {names[0]} now")
    path.write_text(document)
    return moved


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
