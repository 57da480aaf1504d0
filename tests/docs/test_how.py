"""The page "How DDP works" computes what the planner computes, from what was measured, and opens from a file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from docs.website import how
from docs.website.how import Setting, profiles, simulate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def drawn(count: int) -> list[Setting]:
    generator = random.Random(0)

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** generator.random())

    return [
        Setting(
            model=generator.choice(list(profiles())),
            cap_mb=generator.choice(how.CAPS_MB),
            link_gbit=between(0.1, 100),
            latency_us=between(1, 10000),
            ranks=generator.choice([2**k for k in range(1, 11)]),
            speed=between(1, 1000),
            late=generator.random() < 0.2,
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install minddp[docs]")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.wrong = []
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("console", lambda text: page.wrong.append(text.text) if text.type == "error" else None)
        page.goto(how.PAGE.as_uri())
        yield page
        assert not page.wrong
        browser.close()


def test_the_page_holds_what_was_measured() -> None:
    assert how.DATA.search(how.PAGE.read_text())[0] == how.data()


def test_the_script_and_the_package_compute_the_same(tab: Any) -> None:
    settings = drawn(200)
    given = [
        {"model": s.model, "cap": s.cap_mb, "link": s.link_gbit, "latency": s.latency_us, "ranks": s.ranks}
        | {"speed": s.speed, "late": s.late}
        for s in settings
    ]
    for setting, answer in zip(settings, tab.evaluate("settings => settings.map(simulate)", given), strict=True):
        del answer["drawn"]
        assert answer == pytest.approx(simulate(setting), rel=1e-9, abs=1e-15), asdict(setting)


def test_a_late_rank_costs_what_it_is_late() -> None:
    setting = Setting("resnet50", 25, 5, 50, 8, 1)
    there, late = simulate(setting), simulate(replace(setting, late=True))
    assert late["step"] - there["step"] == pytest.approx(how.LATE * there["alone"])
    assert there["alone"] < there["plan_seconds"] <= there["best_seconds"] <= there["step"]


def test_every_button_and_switch_draws(tab: Any) -> None:
    """By keyboard, too; a step that never ends says that it is drawn."""
    for button in tab.query_selector_all(".try"):
        button.click()
        words = tab.inner_text("#result")
        hangs = any(word in button.get_attribute("data-set") for word in ("order", "unused"))
        assert ("never ends. Drawn" in words) == hangs, words
        assert "NaN" not in tab.inner_html("#lab")
    tab.click('.try[data-set^="cap=10 link=1 "]')
    before = tab.inner_text("#result")
    tab.focus('input[name="link"]')
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#result") != before
    tab.click("#play")
    tab.wait_for_function("moment > 0")
    tab.click("#play")
    assert tab.inner_text("#play") == "Play"
