"""Scales, ticks and text fitting do their arithmetic right; everything from data is escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from headwater.data_cards import svg
from headwater.data_cards.svg import Scale


def test_a_scale_maps_its_ends_and_its_middle() -> None:
    scale = Scale(0, 10, 100, 300)
    assert [scale(0), scale(5), scale(10)] == [100, 200, 300]
    assert Scale(0, 1, 200, 0)(0.25) == 150


def test_a_scale_over_a_single_value_stays_at_its_start() -> None:
    assert Scale(3, 3, 10, 90)(3) == 10


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 1, 4, [0, 0.5, 1]),
        (0, 0.93, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1892, 4, [0, 500, 1000, 1500, 2000]),
        (-3, 7, 5, [-4, -2, 0, 2, 4, 6, 8]),
        (0, 0, 4, [0, 0.5, 1]),
        (0, 0.0003, 3, [0, 0.0001, 0.0002, 0.0003]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low: float, high: float, about: int, expected: list[float]) -> None:
    assert svg.ticks(low, high, about) == expected


def test_a_text_that_fits_is_left_alone_and_a_longer_one_is_cut() -> None:
    assert svg.fit("short", 100) == "short"
    cut = svg.fit("a rather long label for a bar", 80)
    assert cut.endswith("…")
    assert svg.text_width(cut) <= 80


def test_wrapping_breaks_at_spaces_and_hyphens_and_keeps_every_letter() -> None:
    assert svg.wrap("frequency-weighted", 80) == ["frequency-", "weighted"]
    assert svg.wrap("one two three", 60) == ["one two", "three"]
    assert svg.wrap("-a --b", 500) == ["-a --b"]
    assert "".join(svg.wrap("alpha beta-gamma delta", 45, most=4)) == "alphabeta-gammadelta"


def test_wrapping_cuts_what_needs_too_many_lines() -> None:
    lines = svg.wrap("one two three four five six", 40, most=2)
    assert len(lines) == 2
    assert lines[1].endswith("…")


def test_text_and_attributes_are_escaped() -> None:
    drawn = svg.element("g", svg.text(0, 1.25, "<b> & c"), aria_label='"<x>"', class_="pt", role=None)
    parsed = ET.fromstring(drawn)
    assert parsed.attrib == {"aria-label": '"<x>"', "class": "pt"}
    assert parsed[0].text == "<b> & c"
    assert parsed[0].attrib == {"x": "0", "y": "1.2"}


def test_muted_series_are_grey_and_the_others_take_the_accents_in_order() -> None:
    muted = [True, False, False, True, False]
    assert [svg.series_class(at, muted) for at in range(5)] == ["muted", "s0", "s1", "muted", "s2"]
