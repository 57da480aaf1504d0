"""The site's pages, as files: what they link to, what they load, what they list. `make docs` makes them.

Skipped where Sphinx is missing. A browser opens them in `tests/lab/site`.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

from docs.website.layout import sections
from minddp.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "docs" / "html"

# The first test makes the site where nobody has: that takes as long as Sphinx does.


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason="pip install minddp[docs]")
    if not (SITE / "index.html").exists():
        subprocess.run([sys.executable, "-m", "docs.website", "--no-tutorials"], cwd=ROOT, check=True)
    return SITE


class Page(HTMLParser):
    """What a page links to, and which places in it can be linked to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for key in ("id", "name") if (value := values.get(key))}
        for key in ("href", "src"):
            if values.get(key):
                self.links.append(str(values[key]))


parsed = functools.cache(Page)


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def test_every_page_has_the_sidebar_of_today(site: Path) -> None:
    """Sphinx leaves a page alone that has not changed, and with it what it says of the others."""
    listed = {(site / f"{name}.html").resolve() for names in sections().values() for name in names}
    for path in set(pages(site)) - {site / "index.html"}:
        linked = {(path.parent / link.partition("#")[0]).resolve() for link in parsed(path).links}
        assert listed <= linked | {path.resolve()}, path


def test_the_api_has_the_wrappers_methods_and_what_takes_a_wrapper(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("register_comm_hook", "finalize_backward", "no_sync"):
        assert f'id="minddp.DistributedDataParallel.{name}"' in text
    for name in FUNCTIONS:
        assert f'id="minddp.{name}"' in text
    assert 'id="minddp.LostPeer"' in text


def test_no_link_is_broken(site: Path) -> None:
    every = set(pages(site))
    assert len(every) > 50
    broken = []
    for path in sorted(every):
        for link in parsed(path).links:
            url = urlparse(link)
            if url.scheme or link.startswith(("//", "data:")):
                continue
            target, place = urldefrag(urljoin("/" + path.relative_to(site).as_posix(), link))
            file = site / unquote(urlparse(target).path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif place and file in every and unquote(place) not in parsed(file).places:
                broken.append(f"{path.relative_to(site)}: {link}: no such place")
    assert not broken, "\n".join(broken)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Who reads it needs no network."""
    for path in pages(site):
        for tag in re.findall(r"<(?:script|link|img)[^>]*>", path.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), f"{path.relative_to(site)}: {tag}"
