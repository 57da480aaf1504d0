"""The list of planted faults fits the present sources; ``make mutants`` plants them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalog import ROOT, Mutant, follow, load, planted, problems, spot_of, with_switches
from tests.mutants.places import Sources


def test_every_mutant_stands_once_and_names_tests_that_exist() -> None:
    assert problems(load()) == []


def test_there_are_enough_in_every_part() -> None:
    mutants, sources = load(), Sources(ROOT)
    assert len(mutants) >= 60
    files = [spot_of(mutant, sources).file for mutant in mutants]
    for part in ("csrc/reducer/", "csrc/shm/", "csrc/transport/", "minddp/reduction/", "minddp/module/engine.py",
                 "minddp/guards/", "minddp/planner/"):  # fmt: skip
        assert sum(file.startswith(part) for file in files) >= 2, part


PYTHON = """
class Step:
    def first(self):
        if self.is_ready(
            'now',  # a comment
        ):
            self.send()
        x = 1

    def second(self):
        x = 1
        x = 1
"""
CPP = """
namespace minddp {
template <class T>
class Step : public Base {
 public:
  Step() : x_{1}, y_(2) { start(); }
  bool first() const { return left_ /* or */ > 0 || right_; }  // left_ > 0
};
#define MACRO {
void Step<int>::second() {
  for (;;) { send( x_,
    "a;b" ); }
}
std::function<void(int)> third(bool on = true) { return 1; }
}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in (("minddp/step.py", PYTHON), ("csrc/step.cpp", CPP), ("test_a.py", "def test_y(): pass\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutant(at: str, text: str, becomes: str, *tests: str, id: str = "one") -> Mutant:
    return Mutant(id, "", at, text, becomes, tests or ("test_a.py::test_y",))


@pytest.mark.parametrize(
    ("at", "text", "becomes", "there"),
    [
        ("Step.first", 'self.is_ready("now")', "False", "if (False):\n"),
        ("Step.first", 'if self.is_ready("now"):\n    self.send()', "a()\nb()", "        a()\n        b()\n"),
        ("first", "self.send()", "pass", "            pass\n"),
        ("Step::Step", "start();", ";", "{ ; }"),
        ("Step::Step", "x_{1}", "x_{2}", ": x_{2}, y_(2)"),
        ("Step::first", "left_ > 0", "true", "return true || right_"),
        ("minddp::Step::second", 'send(x_, "a;b");', ";", "(;;) { ; }"),
        ("::third", "1", "2", "{ return 2; }"),
    ],
)
def test_a_text_is_found_however_it_is_written(root: Path, at: str, text: str, becomes: str, there: str) -> None:
    one, sources = mutant(at, text, becomes), Sources(root)
    assert problems([one], root) == []
    spot = spot_of(one, sources)
    assert there in planted(one, spot, sources.text(spot.file))


def test_many_of_cpp_are_planted_at_once(root: Path) -> None:
    sources = Sources(root)
    some = [mutant("Step::first", "left_ > 0", "true", id="a"), mutant("Step::Step", "start();", ";", id="b")]
    source = with_switches([(one, spot_of(one, sources)) for one in some], CPP)
    assert 'return (minddp_mutant("a") ? (true) : (left_ /* or */ > 0)) || right_;' in source
    assert '{ { if (minddp_mutant("b")) { ; } else { start(); } } }' in source


def test_a_list_that_does_not_fit_is_told(root: Path) -> None:
    sound = mutant("Step.first", "self.send()", "pass", id="sound")
    assert problems([sound], root) == []
    twice = mutant("Step.second", "x = 1", "x = 2", id="twice")
    absent = mutant("Step.first", "self.send(1)", "pass", "test_a.py::test_z", id="absent")
    renamed = mutant("Step::begin", "left_ > 0", "true", id="renamed")
    same = Mutant("same", "", "Step::first", "left_ > 0", "left_>0", ())
    told = "\n".join(problems([twice, absent, renamed, same, sound, sound], root))
    for text in (
        "stands 2 times in Step.second: minddp/step.py:11, minddp/step.py:12",
        "does not stand in Step.first",
        "nearest: 'self.send()' (minddp.step.Step.first, minddp/step.py:7)",
        "there is no Step::begin; it stands in Step::first",
        "no test is",
        "no such test",
        "changes nothing",
        "stands twice",
    ):
        assert text in told


def test_a_renamed_function_is_followed(root: Path) -> None:
    entry = '[[mutant]]\nid = "{}"\nfault = ""\nat = "{}"\ntext = "{}"\nbecomes = "f()"\ntests = []\n'
    entries = ("a", "Step::begin", "left_ > 0"), ("b", "Step.zero", "x = 1"), ("c", "Step.first", "self.send()")
    path = root / "list.toml"
    path.write_text("".join(entry.format(*one) for one in entries))
    assert follow(path, root) == ["a: Step::begin is Step::first now"]
    assert [one.at for one in load(path)] == ["Step::first", "Step.zero", "Step.first"]
