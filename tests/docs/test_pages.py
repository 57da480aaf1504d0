"""What the pages say of the code is so: messages are raised, moves between phases are made, every line is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.website import drawings, errors, layout, source
from docs.website.build import configuration
from docs.website.markdown import Writer

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "csrc" / "reducer"


def reading_path() -> str:
    """And what its companions do to its phases."""
    return "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".h", ".cpp"))


# In the words of another message of this list, or of the program.
WORDED_ELSEWHERE = [
    "minddp/ddp.py: err_type(err_msg)",
    "minddp/functional/calls.py: CollectiveError(call.error)",
    "minddp/guards/lost.py: _given_up(dog, group, wait, seconds, verdict, '')",
    "minddp/guards/lost.py: _given_up(dog, group, wait, seconds, verdict, error)",
    "minddp/guards/lost.py: self.lost.with_traceback(None)",
    "minddp/planner/plan.py: ValueError(f'{text}: {error}')",
    "minddp/shm/__init__.py: dist.DistBackendError(f'shm: {reason}')",
    "minddp/timeline/store.py: NoAnswer(str(error))",
    "minddp/timeline/store.py: NoAnswer(str(errors[0]))",
]


def test_every_message_is_found():
    messages, unknown = errors.every_message(), []
    list(errors.raised_in_python(unknown))
    assert unknown == WORDED_ELSEWHERE
    texts = "\n".join(message.text for message in messages)
    for words in ("will not take part in", "the ranks' models differ", "held NaN or infinity", "but past it, and",
                  "an exception has ended their backward", "do not agree on"):  # fmt: skip
        assert words in texts
    of_reducer = {message.where: message for message in messages if message.path.endswith("errors.h")}
    text = "".join(path.read_text() for path in (ROOT / "csrc").rglob("errors.h"))
    assert set(of_reducer) == set(re.findall(r"^inline (?:std::string|const char\*) (\w+)\(", text, re.MULTILINE))
    assert "finished reduction" in of_reducer["unfinished_reduction"].text
    assert "next forward or optimizer step" in of_reducer["unfinished_reduction"].cause
    assert "‹arrivals›" in of_reducer["ready_twice"].text


def test_phases_are_drawn_as_the_code_moves():
    names, moves = drawings.phases_and_moves()
    code = (PATH / "reducer.cpp").read_text()
    assert set(re.findall(r"Phase::(\w+)", reading_path())) == set(names)
    entered = set(re.findall(r"phase = Phase::(\w+)", code))
    assert entered == {move.end for move in moves} - {""}
    assert {name for move in moves for name in move.begins} <= set(names)
    assert len(moves) > 5


def test_every_drawing_is_shown():
    shown = re.findall(r"<!-- drawing: (\w+) -->", (ROOT / "docs" / "pictures.md").read_text())
    assert sorted(shown) == sorted(drawings.DRAWINGS)


def test_every_variable_has_its_line():
    """Those that minddp/environment.py reads, and those that the build reads."""
    page = configuration()
    text = (ROOT / "minddp" / "environment.py").read_text() + (ROOT / "setup.py").read_text()
    read = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', text)) - {"PATH"}
    read |= set(re.findall(r'getenv\("([A-Z_]+)"', "".join(p.read_text() for p in (ROOT / "csrc").rglob("*.cpp"))))
    assert read <= set(re.findall(r"^\* `([A-Z_]+)`", page, re.MULTILINE)), page


@pytest.mark.parametrize("path", [*layout.make_layout().cpp, *layout.make_layout().python])
def test_the_annotated_source_shows_every_line_of_code(path):
    text = (ROOT / path).read_text()
    rows = (source.python_rows if path.endswith(".py") else source.cpp_rows)(text)
    shown = {line for row in rows if row.first for line in range(row.first, row.last + 1)}
    notes = " ".join(" ".join(row.note) for row in rows)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or number in shown:
            continue
        words = re.sub(r'^\s*(?://|#|r?""")\s?|"""$', "", line).strip()
        assert words in ("", '"""') or words in notes, f"{path}:{number}: {line}"


def test_the_menu_holds_the_core_and_says_where_to_begin():
    found = layout.make_layout()
    listed = [path for path in found.python if found.pages[path] not in found.orphans]
    assert listed and all(path.count("/") == 1 for path in listed)
    path = "csrc/reducer/reducer.cpp"
    page = source.render(path, found.pages[path], found, Path("source"))
    assert "Read from `on_ready` to `unpack`" in page.partition("## `")[0]


def test_contributing_shows_a_test_that_is_there():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert shown and (ROOT / "tests/module/test_example.py").read_text().endswith(f"\n\n{shown[1]}")


def test_a_link_to_nothing_is_an_error(tmp_path):
    writer = Writer(layout.make_layout(), tmp_path, {})
    assert writer.translate("[x](CHANGELOG.md)", "index", "README.md") == "[x](changelog.md)\n"
    assert "[`csrc/reducer/wait.h`](source/csrc/reducer/wait.h.md)" in writer.translate(
        "see `csrc/reducer/wait.h`", "index", "README.md"
    )
    with pytest.raises(ValueError, match="no file of the repository"):
        writer.translate("[x](nothing.md)", "index", "README.md")
