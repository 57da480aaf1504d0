"""Which file of the repository becomes which page, and in which order."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# By section of the sidebar: page -> the file that it is made from. An empty file: made by build.py.
SECTIONS: dict[str, dict[str, str]] = {
    "Use it": {
        "install": "docs/install.md",
        "first": "docs/first.md",
        "migrating": "docs/migrating.md",
        "differences": "docs/differences.md",
        "comparison": "docs/comparison.md",
        "gaps": "docs/gaps.md",
        "arguments": "docs/arguments.md",
        "wrapper": "docs/wrapper.md",
        "uneven": "docs/uneven.md",
        "owned": "docs/owned.md",
        "launching": "docs/launching.md",
        "torchft": "docs/torchft.md",
        "gpus": "docs/gpus.md",
        "configuration": "",
        "troubleshooting": "docs/troubleshooting.md",
        "timeline": "docs/timeline.md",
        "report": "docs/report.md",
    },
    "Learn": {
        "learn": "docs/learn.md",
        "pictures": "docs/pictures.md",
        "mini": "tutorials/mini_ddp.py",
        "tutorials": "",
        "exercises": "exercises/README.md",
        "cpp": "docs/cpp.md",
        "glossary": "docs/glossary.md",
    },
    "The source": {
        "reading": "csrc/README.md",
        "source/cpp": "",
        "source/python": "",
        "reducers": "docs/reducers.md",
    },
    "Reference": {
        "api": "",
        "performance": "docs/performance.md",
        "benchmarks": "benchmarks/README.md",
        "faults": "docs/faults.md",
        "changelog": "CHANGELOG.md",
        "contributing": "CONTRIBUTING.md",
    },
}
# Pages that other pages link to, or that one searches; they are not in the menu.
OFF_MENU = {
    "errors": "",
    "functions": "exercises/exercises.py",
    "solutions": "exercises/solutions/solutions.py",
    "pains": "docs/pains.md",
    "conformance": "docs/conformance.md",
    "trust": "docs/trust.md",
    "measurements": "docs/measurements.md",
}
HOME = "README.md"


def sections() -> dict[str, dict[str, str]]:
    """The menu: SECTIONS, and under Reference whatever else lies in docs/."""
    listed = {path for pages in [*SECTIONS.values(), OFF_MENU] for path in pages.values()}
    found = {section: dict(pages) for section, pages in SECTIONS.items()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if f"docs/{path.name}" not in listed:
            found["Reference"][path.stem] = f"docs/{path.name}"
    return found


# What to read of minddp/, in this order; the other files follow, room by room.
PYTHON_FIRST = [
    "minddp/ddp.py",
    "minddp/averager.py",
    "minddp/config.py",
    "minddp/parameters.py",
    "minddp/reducer.py",
    "minddp/buckets.py",
    "minddp/reductions/weights.py",
    "minddp/start.py",
]


@dataclass
class Layout:
    """Pages by the repository's file, such as ``{"csrc/reducer/reducer.h": "source/csrc/reducer/reducer.h"}``."""

    pages: dict[str, str] = field(default_factory=dict)
    cpp: list[str] = field(default_factory=list)
    python: list[str] = field(default_factory=list)
    tutorials: list[str] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)  # pages that are in no menu

    def page(self, path: str) -> str | None:
        return self.pages.get(path)


def relative(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def core_in_reading_order() -> list[str]:
    """The tables of csrc/README.md that number files."""
    text = (ROOT / "csrc" / "README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    return [f"csrc/reducer/{name}" for row in rows for name in re.findall(r"`(\w+\.(?:h|cpp))`", row.split("|")[2])]


def cpp_in_reading_order() -> list[str]:
    """The core, then what lies beside the path. A unit's header stands before its code."""
    first = core_in_reading_order()
    suffixes = {".h", ".cpp", ".cu", ".cuh"}
    every = sorted(relative(path) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)
    rest = [path for path in every if path not in first]
    rest.sort(key=lambda path: (not path.startswith("csrc/reducer"), *path.rpartition(".")[::2]))
    missing = [path for path in first if path not in every]
    if missing:
        raise ValueError(f"csrc/README.md names files that are not there: {missing}")
    return first + sorted(rest, key=lambda path: (path.count("/") == 1, path.rpartition(".")[0], path[-2:] != ".h"))


def python_in_reading_order() -> list[str]:
    every = [relative(path) for path in sorted((ROOT / "minddp").rglob("*.py"))]
    every = [path for path in every if ast.parse((ROOT / path).read_text()).body]
    return PYTHON_FIRST + [path for path in every if path not in PYTHON_FIRST]


def is_core_python(path: str) -> bool:
    """Companions are folders of minddp/; what lies beside them is the core."""
    return path.startswith("minddp/") and path.count("/") == 1


def make_layout() -> Layout:
    layout = Layout()
    for section in [*sections().values(), OFF_MENU]:
        for page, path in section.items():
            if path:
                layout.pages[path] = page
    layout.pages[HOME] = "readme"  # index.html is docs/how.html (how.py)
    layout.cpp, layout.python = cpp_in_reading_order(), python_in_reading_order()
    layout.pages |= {path: f"source/{path}" for path in layout.cpp + layout.python}
    core = core_in_reading_order()
    beside = [path for path in layout.cpp if path not in core]
    beside += [path for path in layout.python if not is_core_python(path)]
    layout.orphans = {*OFF_MENU, *(layout.pages[path] for path in beside)}
    layout.tutorials = [relative(path) for path in sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))]
    layout.pages |= {path: "tutorials/" + Path(path).stem for path in layout.tutorials}
    return layout
