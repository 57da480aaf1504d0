"""Opens every page of the site in a headless Chromium, narrow and wide, in light and in dark.

Skipped where Sphinx, playwright or Chromium is missing; `make docs` makes the site that is opened, and runs this.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_site import pages, site  # noqa: F401  (a fixture)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = (390, 844), (1280, 800)
BROWSERS = 4  # each opens some of the pages


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:  # noqa: F811
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")
@pytest.mark.parametrize("part", range(BROWSERS))
def test_every_page_in_a_browser(site: Path, address: str, part: int) -> None:  # noqa: F811
    """No error in the console, nothing wider than the window, no code cut off, dark where the reader's system is."""
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
                wide, window, background, broken, glaring, wider, cut = tab.evaluate(MEASURE)
                wrong += [f"{tab.url}: at {width} pixels this code is cut off: {line}" for line in cut]
                if width > PHONE[0]:  # on a phone code scrolls in its frame
                    wrong += [f"{tab.url}: at {width} pixels wider than its frame: {line}" for line in wider]
                wrong += [f"{tab.url}: {word!r} of a heading is broken at {width} pixels" for word in broken]
                if scheme == "dark":
                    wrong += [f"{tab.url}: {picture} is as bright as by day" for picture in glaring]
                if wide > window:
                    wrong.append(f"{tab.url}: {wide} pixels wide, the window has {window}")
                if (brightness(background) > 128) != (scheme == "light"):
                    wrong.append(f"{tab.url}: background {background} in {scheme} mode")
        browser.close()
    assert not wrong, "\n".join(wrong)


# The page's width and the window's, its background, words of headings that stand on two lines, pictures as drawn,
# code that is wider than its frame, and such code that does not scroll there.
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
    const wide = [...document.querySelectorAll("pre")].filter(code => code.scrollWidth > code.clientWidth + 1);
    const hidden = wide.filter(code => !["auto", "scroll"].includes(getComputedStyle(code).overflowX));
    const begins = blocks => blocks.map(code => code.textContent.trim().slice(0, 60));
    return [document.documentElement.scrollWidth, document.documentElement.clientWidth,
            getComputedStyle(document.body).backgroundColor, broken, glaring, begins(wide), begins(hidden)];
})()"""


def failed(wrong: list[str], page: str, request: object) -> None:
    """But for one that the way to the next page has cut short; one that finds nothing is an error in the console."""
    if request.failure != "net::ERR_ABORTED":
        wrong.append(f"{page}: {request.url}: {request.failure}")


def brightness(colour: str) -> float:
    """From 0 to 255, of a colour such as "rgb(19, 20, 22)"."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
