"""The report in a real browser: silent, self-contained, readable on a phone, usable by keyboard."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import find_chromium, open_page
from report_samples import make_report

from headwater.data_cards.report import render_report

_COLUMN = "[...document.querySelectorAll('table.sortable tbody tr')].map(row => row.cells[5].textContent)"
_SORT = "document.querySelectorAll('table.sortable th button')[5].click()"
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_FOCUS = """
(() => {
  const point = [...document.querySelectorAll('.pt')].find(p => p.querySelector('.tip') && p.getClientRects().length);
  point.focus({focusVisible: true});
  const tip = point.querySelector('.tip');
  return [document.activeElement === point, getComputedStyle(tip).visibility, tip.textContent];
})()
"""
_SMALL_TEXT = """
[...document.querySelectorAll('svg text')]
  .filter(t => t.getClientRects().length)
  .map(t => 12 * t.getCTM().a)
  .filter(size => size < 9).length
"""
_OUTSIDE = """
[...document.querySelectorAll('svg text:not(.tip)')]
  .filter(t => t.getClientRects().length)
  .filter(t => {
    const [inner, outer] = [t.getBoundingClientRect(), t.ownerSVGElement.getBoundingClientRect()];
    return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 3;
  })
  .map(t => t.textContent)
"""


@dataclass
class Seen:
    """What the browser saw on one visit."""

    text: str = ""
    logged: list[dict[str, Any]] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    sorted_once: list[str] = field(default_factory=list)
    sorted_twice: list[str] = field(default_factory=list)
    overflow: dict[int, int] = field(default_factory=dict)
    small_text: dict[int, int] = field(default_factory=dict)
    outside: dict[int, list[str]] = field(default_factory=dict)
    charts: dict[int, int] = field(default_factory=dict)
    background: dict[str, str] = field(default_factory=dict)
    focus: tuple[bool, str, str] = (False, "", "")
    fetched: str = ""


async def visit(binary: str, html: Path, profile: Path) -> Seen:
    seen = Seen()
    async with open_page(binary, html, profile) as page:
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.resize(1200)
        seen.text = await page.evaluate("document.body.innerText")
        await page.evaluate(_SORT)
        seen.sorted_once = await page.evaluate(_COLUMN)
        await page.evaluate(_SORT)
        seen.sorted_twice = await page.evaluate(_COLUMN)
        seen.focus = await page.evaluate(_FOCUS)
        for width in (1200, 800, 400, 320):
            await page.resize(width)
            seen.overflow[width] = await page.evaluate(_OVERFLOW)
            seen.small_text[width] = await page.evaluate(_SMALL_TEXT)
            seen.outside[width] = await page.evaluate(_OUTSIDE)
            seen.charts[width] = await page.evaluate(
                "[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length).length"
            )
        for scheme in ("light", "dark"):
            await page.set_scheme(scheme)
            seen.background[scheme] = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.logged, seen.requested = page.logged(), page.requested()
        seen.fetched = (
            await page.send(
                "Runtime.evaluate",
                expression="fetch('http://127.0.0.1:9/').then(() => 'let through', () => 'refused')",
                awaitPromise=True,
                returnByValue=True,
            )
        )["result"]["value"]
        policy = [event for event in page.logged() if "Content Security Policy" in str(event)]
        seen.fetched += " by policy" if policy else ""
    return seen


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(make_report()), "utf-8")
    return path


@pytest.fixture(scope="module")
def seen(html: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    binary = find_chromium()
    if binary is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return asyncio.run(visit(binary, html, tmp_path_factory.mktemp("profile")))


def test_nothing_is_logged_to_the_console(seen: Seen) -> None:
    assert seen.logged == []


def test_only_the_page_itself_is_requested(seen: Seen, html: Path) -> None:
    assert seen.requested == [html.as_uri()]


def test_the_policy_refuses_any_connection(seen: Seen) -> None:
    assert seen.fetched == "refused by policy"


def test_the_page_shows_its_numbers(seen: Seen) -> None:
    for number in ("298", "80.3%", "1,186", "0.942", "5 min 12 s", "4,102 · 86.0%", "1,892", "4.2%"):
        assert number in seen.text


def test_a_click_on_a_column_title_sorts_by_number_with_gaps_last(seen: Seen) -> None:
    assert seen.sorted_once == ["15", "12", "8", "–"]
    assert seen.sorted_twice == ["8", "12", "15", "–"]


def test_a_point_in_focus_shows_its_value(seen: Seen) -> None:
    focused, visibility, label = seen.focus
    assert focused
    assert visibility == "visible"
    assert label == "missing features, δ (SAE activation) 0: 100%"


@pytest.mark.parametrize("width", [1200, 800, 400, 320])
def test_the_page_fits_its_width_with_letters_large_enough_to_read(seen: Seen, width: int) -> None:
    assert seen.charts[width] == 6
    assert seen.overflow[width] == 0
    assert seen.outside[width] == []
    assert seen.small_text[width] == 0


def test_light_and_dark_follow_the_reader(seen: Seen) -> None:
    assert seen.background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}
