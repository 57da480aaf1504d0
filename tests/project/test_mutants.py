"""The list of planted faults fits the present sources; ``make mutants`` plants them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalog import Mutant, load, planted, problems


def test_every_mutant_stands_once_and_names_tests_that_exist() -> None:
    assert problems(load()) == []


def test_there_are_enough_in_every_part() -> None:
    mutants = load()
    assert len(mutants) >= 60
    for part in ("csrc/reducer/", "csrc/shm/", "csrc/transport/", "minddp/reduction/", "minddp/module/engine.py",
                 "minddp/guards/", "minddp/planner/"):  # fmt: skip
        assert sum(mutant.file.startswith(part) for mutant in mutants) >= 2, part


def test_a_list_that_does_not_fit_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 2\n")
    (tmp_path / "test_a.py").write_text("def test_y(): pass\n")
    sound = Mutant("sound", "", "a.py", "y = 2", "y = 3", ("test_a.py::test_y",))
    assert problems([sound], tmp_path) == []
    assert planted(sound, "y = 2") == "y = 3"
    twice = Mutant("twice", "", "a.py", "x = 1", "x = 2", ("test_a.py::test_y",))
    absent = Mutant("absent", "", "a.py", "z", "zz", ("test_a.py::test_z",))
    same = Mutant("same", "", "a.py", "y = 2", "y = 2", ())
    told = "\n".join(problems([twice, absent, same, sound, sound], tmp_path))
    for text in ("stands 2 times", "stands 0 times", "no such test", "changes nothing", "no test is", "stands twice"):
        assert text in told
    with pytest.raises(ValueError, match="stands 2 times"):
        planted(twice, (tmp_path / "a.py").read_text())
