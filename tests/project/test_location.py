"""Unbuilt sources give way to an installed package; tests/package does it with real installations."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from minddp._location import package_path


def package(folder: Path, built: bool, text: str = "") -> Path:
    folder = folder / "minddp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    if built:
        (folder / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return folder


def test_built_sources_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = package(tmp_path / "clone", built=True)
    package(tmp_path / "site", built=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone"), str(tmp_path / "site")])
    assert package_path([str(sources)]) == [str(sources)]


def test_unbuilt_sources_give_way_without_a_word_where_the_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    sources = package(tmp_path / "clone", built=False)
    package(tmp_path / "unbuilt", built=False)
    installed = package(tmp_path / "site", built=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("clone", "nowhere", "unbuilt", "site")])
    assert package_path([str(sources)]) == [str(installed)]
    assert not recwarn.list


@pytest.mark.parametrize("change", ["text", "file"])
def test_files_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    sources = package(tmp_path / "clone", built=False, text="new" if change == "text" else "")
    if change == "file":
        (sources / "more.py").touch()
    installed = package(tmp_path / "site", built=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.warns(RuntimeWarning, match=r"differ from it \((__init__|more)\.py\)"):
        assert package_path([str(sources)]) == [str(installed)]


def test_nothing_installed_leaves_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose import then says that they are not built."""
    sources = package(tmp_path / "clone", built=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone")])
    assert package_path([str(sources)]) == [str(sources)]
