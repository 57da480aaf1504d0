"""README.md is short, and its figures are those of the pages that are written by programs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _rows(section: str) -> list[list[str]]:
    """The cells of the section's table, without its head."""
    _, _, text = README.partition(f"## {section}\n")
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_lost_faults_are_those_of_the_matrix() -> None:
    """``make lab ARGS=faults`` writes the page."""
    page = (ROOT / "docs" / "faults.md").read_text()
    found = {
        name: re.search(rf"^- {name}: (\d+) cells; .*lost: (\d+)$", page, re.MULTILINE)
        for name in ("torch", "minddp")
    }
    told = re.search(
        r"^\| of (\d+) faults, (\d+) are lost \| of (\d+) faults, (\d+) are lost \|$", README, re.MULTILINE
    )
    assert told and found["torch"] and found["minddp"]
    assert told.groups() == (*found["torch"].groups(), *found["minddp"].groups())


def test_times_are_those_of_the_stored_results() -> None:
    """``python benchmarks/page.py`` writes the page from benchmarks/results."""
    spread = re.compile(r"([\d.]+)(?: ms)? \[([\d.]+), ([\d.]+)\]")
    stored = [list(map(float, found)) for found in spread.findall((ROOT / "docs" / "measurements.md").read_text())]
    rows = _rows("Performance")
    told = spread.findall(README)
    assert len(rows) == 5 and len(told) >= 2 * len(rows) + 1
    for median, *quartiles in told:
        shown = [median, *quartiles]
        digits = [len(number.partition(".")[2]) for number in shown]
        assert any(
            all(f"{value / unit:.{count}f}" == number for value, count, number in zip(values, digits, shown))
            for values in stored
            for unit in (1, 1000)  # milliseconds, microseconds
        ), f"no stored result is {shown}"
    for name, baseline, ours, share, _ in rows:
        of_medians = float(ours.split()[0]) / float(baseline.split()[0])
        assert abs(of_medians - float(share.split()[0])) < 0.05, name  # a median of each round's ratio, for some
