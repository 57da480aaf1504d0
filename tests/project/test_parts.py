"""The parts of `make test-all`: a commit chooses one, each is there, and the table tells when it was green."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests import parts

ROOT = Path(__file__).resolve().parents[2]


def test_a_commit_always_chooses_the_same_part_and_each_has_its_turn() -> None:
    commits = [hashlib.sha1(str(i).encode()).hexdigest() for i in range(300)]
    chosen = [parts.chosen_by(commit) for commit in commits]
    assert chosen == [parts.chosen_by(f"{commit}+") for commit in commits]
    assert set(chosen) == set(parts.EACH)


def test_every_part_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w%.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"check-torch-2.11.0"} if "check-torch-%" in targets else set()
    assert {target for target, *_ in [*parts.EACH.values(), *parts.NIGHT.values()]} <= targets
    assert set(parts.ALWAYS) <= targets
    ci = (ROOT / ".ci/run").read_text()
    assert set(parts.ALWAYS) == set(re.findall(r"^ *step ([\w-]+)", ci, re.MULTILINE))


def test_the_table_has_what_was_green_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GREEN", str(tmp_path / "notes"))
    assert parts.status().count("never") == len(parts.ALWAYS) + len(parts.EACH) + len(parts.NIGHT)
    for seconds in (7, 12):
        assert parts.main(["green", "lint", str(seconds)]) == 0
    assert parts.main(["status"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"lint +20\d\d-\d\d-\d\d \d\d:\d\d +[0-9a-f]*\+? +12", rows[-1])
    assert sum(row.startswith("lint") for row in rows) == 1


def test_only_what_is_green_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GREEN", str(tmp_path / "notes"))
    monkeypatch.setattr(parts, "EACH", {"good": ["--version"], "bad": ["no-such-target"]})
    assert parts.main(["run", "good", "bad"]) == 1
    assert '"good"' in (tmp_path / "notes").read_text() and "bad" not in (tmp_path / "notes").read_text()


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parts.main(["run", "nothing"])
    assert "no such part: nothing" in capsys.readouterr().err
