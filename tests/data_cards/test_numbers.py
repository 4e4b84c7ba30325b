"""Numbers print with three significant digits, separators and honest ends."""

from __future__ import annotations

import math

import pytest

from headwater.data_cards.numbers import format_number, format_tick


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (12345, "", "12,345"),
        (1234567.8, "", "1,234,568"),
        (0.80341, "", "0.803"),
        (12.345, "", "12.3"),
        (123.4, "", "123"),
        (9.996, "", "10.0"),
        (999.7, "", "1,000"),
        (2.0, "", "2"),
        (0.000012, "", "1.20e−5"),
        (-0.5, "", "−0.500"),
        (None, "", "–"),
        (math.nan, "share", "–"),
        (math.inf, "", "∞"),
        (336, "rows", "336 rows"),
        (0.8034, "share", "80.3%"),
        (0.0, "share", "0%"),
        (1.0, "share", "100%"),
        (0.9999, "share", ">99.9%"),
        (0.0001, "share", "<0.1%"),
        (0.005, "s", "<0.1 s"),
        (3.25, "s", "3.25 s"),
        (312.4, "s", "5 min 12 s"),
        (7500, "s", "2 h 5 min"),
        (999, "bytes", "999 B"),
        (1_234_000, "bytes", "1.23 MB"),
        (0.004, "$", "<$0.01"),
        (1234.5, "$", "$1,234.50"),
    ],
)
def test_a_number_reads_well(value: float | None, unit: str, text: str) -> None:
    assert format_number(value, unit) == text


def test_ticks_are_as_short_as_they_can_be() -> None:
    ticks = [format_tick(value) for value in (0.0, 0.25, 1.0, 25000.0, -2.0)]
    assert ticks == ["0", "0.25", "1", "25,000", "−2"]
    assert format_tick(0.25, "share") == "25%"
