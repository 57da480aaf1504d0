"""What comments, docstrings and pages name exists."""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ["minddp/**/*.py", "minddp/*.pyi", "csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu", "csrc/**/*.cuh"]
PROGRAMS = ["tests/**/*.py", "tests/**/*.h", "tests/**/*.cpp", "benchmarks/*.py", "tutorials/*.py", "setup.py"]
PROGRAMS += ["exercises/**/*.py", "docs/website/*.py"]
PAGES = ["*.md", "docs/*.md", "*/README.md"]
OTHERS = ["Makefile", "*.toml", "tests/**/*.toml", "tests/**/*.txt", ".ci/run"]
TORCH = ["**/*.py", "**/*.pyi", "include/torch/csrc/**/*.h*", "include/ATen/*.h", "include/c10/**/*.h"]
# Of other projects, or a reader's own.
FOREIGN = {
    *("autofunction", "automodule", "currentmodule"),  # Sphinx
    *("prepare_model", "shareProcessNamespace", "eth0", "torch2"),
    *("FUTEX_PRIVATE_FLAG", "CLOCK_MONOTONIC", "GUARDED_BY"),
    *("my_loss", "my_models", "make_resnet"),
    *("SLURM_", "NCCL_", "GLOO_"),  # what names of variables begin with
    *("sum_s", "rows_r"),  # formulas; x_s and the like are none of our names
}

Text = tuple[set[str], str]  # words of the code, and what is said about it


def _python(text: str) -> Text:
    code: set[str] = set()
    prose = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""')):
            prose.append(token.string.lstrip("# "))
        else:
            code |= _words(token.string)
    return code, "\n".join(prose)


def _cpp(text: str) -> Text:
    return _words(re.sub(r"//.*", "", text)), "\n".join(re.findall(r"//[ /]*(.*)", text))


def _markdown(text: str) -> Text:
    return set(), re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _read(path: Path) -> Text:
    return {".py": _python, ".pyi": _python, ".md": _markdown}.get(path.suffix, _cpp)(path.read_text())


def _files(patterns: list[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from ROOT.glob(pattern)


@functools.cache
def known() -> set[str]:
    """Words of the code, and of the files' names."""
    words: set[str] = set()
    for path in _files(PACKAGE + PROGRAMS):
        words |= _read(path)[0] | _words(path.relative_to(ROOT).as_posix())
    for path in _files(OTHERS):
        words |= _words(path.read_text())
    return words


@functools.cache
def torchs() -> set[str]:
    words: set[str] = set()
    for pattern in TORCH:
        for path in Path(torch.__file__).parent.glob(pattern):
            words |= _words(path.read_text(errors="ignore"))
    return words


def named(prose: str, marked_only: bool) -> set[str]:
    """Words that are names: in backticks, where that looks like code; and with an underscore inside, anywhere."""
    spans = [a or b for a, b in re.findall(r"``([^`]+)``|(?<!`)`([^`\n]+)`(?!`)", prose)]
    text = "\n".join(span for span in spans if re.search(r"[_.(]|[a-z][A-Z]", span))
    text = re.sub(r"-k \w+", "", text)  # parts of tests' names, see test_commands.py
    found = set(re.findall(r"(?<!\w)[A-Za-z_]\w*", text))
    if not marked_only:
        found |= set(re.findall(r"(?<![\w/`{‹<])[A-Za-z]\w*_\w+", re.sub(r"``?[^`]*``?", "", prose)))
    return {word for word in found if len(word) > 2 and word[1] != "_"}


@pytest.mark.parametrize("pattern", PACKAGE + PAGES)
def test_names_exist(pattern: str) -> None:
    unknown = []
    for path in _files([pattern]):
        for name in named(_read(path)[1], marked_only=path.suffix == ".md") - known() - FOREIGN:
            if name[0].lower() + name[1:] not in known() | torchs():  # it may begin a sentence
                unknown.append(f"{path.relative_to(ROOT)}: {name}")
    assert not unknown


def test_it_sees_what_it_looks_for() -> None:
    code, prose = _python('def f(a_name):\n    """Calls ``gone_from()`` and `Gone.too`."""\n    # and never_was\n')
    assert "a_name" in code and "never_was" not in code
    assert named(prose, marked_only=False) == {"gone_from", "Gone", "too", "never_was"}
    code, prose = _cpp("int a_name;  // of `not_there`, and by_hand\n")
    assert "a_name" in code and named(prose, marked_only=True) == {"not_there"}
