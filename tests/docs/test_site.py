"""Opens every page of the site in a headless Chromium, narrow and wide, in light and in dark.

Skipped where Sphinx, playwright or Chromium is missing; `make docs` makes the site that is opened.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

from docs.website.layout import sections
from minddp._functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "docs" / "html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = (390, 844), (1440, 900)
BROWSERS = 4  # each opens some of the pages

# The first test makes the site where nobody has: that takes as long as Sphinx does.


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason="pip install minddp[docs]")
    if not (SITE / "index.html").exists():
        subprocess.run([sys.executable, "-m", "docs.website", "--no-tutorials"], cwd=ROOT, check=True)
    return SITE


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


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


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")
@pytest.mark.parametrize("part", range(BROWSERS))
def test_every_page_in_a_browser(site: Path, address: str, part: int) -> None:
    """No error in the console, nothing wider than the window, and dark where the reader's system is."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install minddp[docs]")
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context().new_page()
        tab.on("console", lambda text: wrong.append(f"{tab.url}: {text.text}") if text.type == "error" else None)
        tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))
        tab.on("requestfailed", lambda request: failed(wrong, tab.url, request))
        for path in pages(site)[part::BROWSERS]:
            tab.goto(address + path.relative_to(site).as_posix())
            for (width, height), scheme in ((PHONE, "light"), (DESKTOP, "dark")):
                tab.set_viewport_size({"width": width, "height": height})
                tab.emulate_media(color_scheme=scheme)
                wide, window, background, broken, glaring = tab.evaluate(MEASURE)
                wrong += [f"{tab.url}: {word!r} of a heading is broken at {width} pixels" for word in broken]
                if scheme == "dark":
                    wrong += [f"{tab.url}: {picture} is as bright as by day" for picture in glaring]
                if wide > window:
                    wrong.append(f"{tab.url}: {wide} pixels wide, the window has {window}")
                if (brightness(background) > 128) != (scheme == "light"):
                    wrong.append(f"{tab.url}: background {background} in {scheme} mode")
        browser.close()
    assert not wrong, "\n".join(wrong)


# The page's width and the window's, its background, words of headings that stand on two lines, pictures as drawn.
MEASURE = """(() => {
    const broken = [];
    for (const heading of document.querySelectorAll("article h1, article h2, article h3")) {
        const texts = document.createTreeWalker(heading, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            for (const word of texts.currentNode.data.matchAll(/[^\\s\\-/_]+/g)) {
                const range = document.createRange();
                range.setStart(texts.currentNode, word.index);
                range.setEnd(texts.currentNode, word.index + word[0].length);
                if (new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1)
                    broken.push(word[0]);
            }
        }
    }
    const glaring = [...document.querySelectorAll("article img")].filter(
        picture => getComputedStyle(picture).filter == "none").map(picture => picture.getAttribute("src"));
    return [document.documentElement.scrollWidth, document.documentElement.clientWidth,
            getComputedStyle(document.body).backgroundColor, broken, glaring];
})()"""


def failed(wrong: list[str], page: str, request: object) -> None:
    """But for one that the way to the next page has cut short; one that finds nothing is an error in the console."""
    if request.failure != "net::ERR_ABORTED":
        wrong.append(f"{page}: {request.url}: {request.failure}")


def brightness(colour: str) -> float:
    """From 0 to 255, of a colour such as "rgb(19, 20, 22)"."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
