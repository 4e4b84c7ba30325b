"""Every chart draws its values to scale, as valid and accessible SVG, and gives them as a table."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from pydantic import ValidationError
from report_samples import ACTIVATIONS, BY_KIND, COVERAGE, FUNNEL, REJECTS, SWEEP

from headwater.data_cards.charts import FULL_WIDTH, HALF_WIDTH, NARROW_WIDTH, draw_chart
from headwater.data_cards.report import (
    Bar,
    Bars,
    BeforeAfter,
    Chart,
    Funnel,
    GroupedBars,
    Histogram,
    Line,
    Lines,
    Pair,
    Reference,
    Series,
    Step,
)

ALL = [COVERAGE, SWEEP, ACTIVATIONS, BY_KIND, FUNNEL, REJECTS]
AXES: dict[str, Any] = {"x_label": "x", "y_label": "y"}


def draw(chart: Chart, width: int = FULL_WIDTH) -> ET.Element:
    return ET.fromstring(draw_chart(chart, width, "c"))


def labels(root: ET.Element) -> list[str]:
    return [group.attrib["aria-label"] for group in root.iter("g") if group.get("class") == "pt"]


def boxes(root: ET.Element) -> list[dict[str, float]]:
    return [{key: float(box.attrib[key]) for key in ("x", "y", "width", "height")} for box in root.iter("rect")]


@pytest.mark.parametrize("width", [FULL_WIDTH, HALF_WIDTH, NARROW_WIDTH])
@pytest.mark.parametrize("chart", ALL, ids=lambda chart: chart.kind)
def test_a_chart_is_named_described_and_reachable_by_keyboard(chart: Chart, width: int) -> None:
    root = draw(chart, width)
    ids = {element.attrib["id"]: element.text for element in root if "id" in element.attrib}
    assert ids[root.attrib["aria-labelledby"]] == chart.title
    assert len(ids[root.attrib["aria-describedby"]] or "") > 20
    points = [group for group in root.iter("g") if group.get("class") == "pt"]
    assert points
    for point in points:
        assert point.attrib["tabindex"] == "0"
        assert point[0].tag == "title"
        assert point[0].text == point.attrib["aria-label"]


@pytest.mark.parametrize("width", [FULL_WIDTH, HALF_WIDTH, NARROW_WIDTH])
@pytest.mark.parametrize("chart", ALL, ids=lambda chart: chart.kind)
def test_no_mark_lies_outside_the_drawing(chart: Chart, width: int) -> None:
    root = draw(chart, width)
    _, _, right, bottom = (float(number) for number in root.attrib["viewBox"].split())
    for box in boxes(root):
        assert 0 <= box["x"] <= box["x"] + box["width"] <= right
        assert 0 <= box["y"] <= box["y"] + box["height"] <= bottom
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= right
        assert 0 <= float(circle.attrib["cy"]) <= bottom
    assert "nan" not in ET.tostring(root, "unicode")


def test_bars_are_drawn_to_scale() -> None:
    drawn = boxes(draw(Bars(title="t", bars=(Bar(label="a", value=50), Bar(label="b", value=25)))))
    assert drawn[0]["width"] == pytest.approx(2 * drawn[1]["width"], abs=0.2)
    assert drawn[0]["x"] == drawn[1]["x"]


def test_a_negative_bar_ends_where_a_positive_one_begins() -> None:
    minus, plus = boxes(draw(Bars(title="t", bars=(Bar(label="a", value=-1), Bar(label="b", value=2)))))
    assert minus["x"] + minus["width"] == pytest.approx(plus["x"], abs=0.2)
    assert plus["width"] == pytest.approx(2 * minus["width"], abs=0.2)


def test_grouped_bars_are_drawn_to_scale_from_a_common_foot() -> None:
    chart = GroupedBars(title="t", categories=("a", "b"), series=(Series(name="s", values=(4.0, 1.0)),))
    tall, short = boxes(draw(chart))
    assert tall["height"] == pytest.approx(4 * short["height"], abs=0.5)
    assert tall["y"] + tall["height"] == pytest.approx(short["y"] + short["height"], abs=0.2)


def test_shares_are_held_against_one_hundred_percent() -> None:
    chart = GroupedBars(title="t", unit="share", categories=("a",), series=(Series(name="s", values=(0.98,)),))
    ticks = [element.text for element in draw(chart).iter("text") if element.get("class") == "tick"]
    assert ticks[0] == "0%"
    assert ticks[-1] == "100%"


def test_an_axis_of_counts_has_no_half_of_a_row() -> None:
    few = GroupedBars(title="t", categories=("a", "b"), series=(Series(name="n", values=(1, 2)),))
    ticks = [text.text for text in draw(few).iter("text") if text.get("class") == "tick"]
    assert ticks == ["0", "1", "2"]


def test_histogram_bars_touch_at_their_edges_in_order() -> None:
    chart = Histogram(title="t", edges=(0, 1, 3), series=(Series(name="s", values=(2, 2)),), **AXES)
    narrow, wide = boxes(draw(chart))
    assert wide["width"] + 1 == pytest.approx(2 * (narrow["width"] + 1), abs=0.3)
    assert labels(draw(chart)) == ["0 to 1: 2", "1 to 3: 2"]


def test_a_missing_value_leaves_a_gap_in_a_line() -> None:
    chart = Lines(title="t", lines=(Line(name="l", x=(0, 1, 2, 3), y=(1, None, 2, math.nan)),), **AXES)
    root = draw(chart)
    assert len([path for path in root.iter("path") if "line" in path.attrib["class"]]) == 2
    assert labels(root) == ["x 0: 1", "x 2: 2"]


def test_a_band_runs_along_its_high_edge_and_back_along_its_low_one() -> None:
    line = Line(name="l", x=(0, 1), y=(5, 5), low=(0, 0), high=(10, 10))
    root = draw(Lines(title="t", lines=(line,), **AXES))
    band = next(path for path in root.iter("path") if "band" in path.attrib["class"])
    heights = [float(y) for _, y in re.findall(r"([\d.]+),([\d.]+)", band.attrib["d"])]
    middle = float(next(root.iter("circle")).attrib["cy"])
    assert heights[0] == heights[1] < middle < heights[2] == heights[3]
    assert middle == pytest.approx((heights[0] + heights[2]) / 2, abs=0.2)


def test_a_reference_line_stands_at_its_value() -> None:
    line = Line(name="l", x=(0, 2), y=(0, 1))
    root = draw(Lines(title="t", lines=(line,), references=(Reference(at=1, label="here"),), **AXES))
    rule = next(element for element in root.iter("line") if element.get("class") == "reference")
    first, last = (float(circle.attrib["cx"]) for circle in root.iter("circle"))
    assert float(rule.attrib["x1"]) == pytest.approx((first + last) / 2, abs=0.2)


def test_a_reference_outside_the_data_widens_the_axis() -> None:
    line = Line(name="l", x=(0, 2), y=(0, 1))
    root = draw(Lines(title="t", lines=(line,), references=(Reference(at=4, label="far"),), **AXES))
    rule = next(element for element in root.iter("line") if element.get("class") == "reference")
    assert float(rule.attrib["x1"]) <= FULL_WIDTH


def test_before_and_after_are_drawn_on_one_axis() -> None:
    pair = Pair(label="a", before=0.25, after=0.75)
    both = Pair(label="b", before=0.75, after=0.25)
    centres = [float(circle.attrib["cx"]) for circle in draw(BeforeAfter(title="t", pairs=(pair, both))).iter("circle")]
    assert centres[0] == centres[3] < centres[1] == centres[2]


def test_a_funnel_tells_the_share_of_the_step_before() -> None:
    chart = Funnel(title="t", steps=(Step(label="a", count=200), Step(label="b", count=50), Step(label="c", count=0)))
    assert chart.shares() == [None, 0.25, 0.0]
    assert labels(draw(chart)) == ["a: 200", "b: 50 · 25.0%", "c: 0 · 0%"]
    assert chart.numbers()[1][1] == ["b", "50", "25.0%", ""]


def test_a_funnel_after_an_empty_step_has_no_share() -> None:
    chart = Funnel(title="t", steps=(Step(label="a", count=0), Step(label="b", count=0)))
    assert chart.shares() == [None, None]
    assert labels(draw(chart)) == ["a: 0", "b: 0"]


def test_the_numbers_of_several_lines_meet_in_one_table() -> None:
    chart = Lines(title="t", lines=(Line(name="p", x=(0, 1), y=(5, 6)), Line(name="q", x=(1, 2), y=(7, None))), **AXES)
    assert chart.numbers() == (["x", "p", "q"], [["0", "5", "–"], ["1", "6", "7"], ["2", "–", "–"]])


def test_names_from_data_are_escaped() -> None:
    chart = Bars(title="<script>", bars=(Bar(label='<img src="x">', value=1, hint="&"),))
    drawn = draw_chart(chart, FULL_WIDTH, "c")
    assert "<script>" not in drawn
    assert "<img" not in drawn
    assert labels(draw(chart)) == ['<img src="x">: 1 (&)']


@pytest.mark.parametrize(
    "chart",
    [
        Bars(title="t", bars=()),
        Bars(title="t", bars=(Bar(label="a", value=None), Bar(label="b", value=math.nan))),
        Funnel(title="t", steps=()),
        BeforeAfter(title="t", pairs=(Pair(label="a", before=None, after=None),)),
        GroupedBars(title="t", categories=(), series=()),
        Histogram(title="t", edges=(0, 1), series=(Series(name="s", values=(0,)),), **AXES),
        Histogram(title="t", edges=(), series=(), **AXES),
        Lines(title="t", lines=(Line(name="l", x=(), y=()),), **AXES),
    ],
    ids=lambda chart: chart.kind,
)
def test_a_chart_without_values_knows_that_it_is_empty(chart: Chart) -> None:
    assert chart.empty


@pytest.mark.parametrize(
    "chart",
    [
        Bars(title="t", bars=(Bar(label="a", value=0),)),
        Bars(title="t", bars=(Bar(label="a", value=3), Bar(label="b", value=None))),
        BeforeAfter(title="t", pairs=(Pair(label="a", before=None, after=0.5),)),
        GroupedBars(title="t", categories=("a", "b"), series=(Series(name="s", values=(None, -2)),)),
        Lines(title="t", lines=(Line(name="l", x=(3,), y=(0,)),), **AXES),
        Histogram(title="t", edges=(0, 1e-9), series=(Series(name="s", values=(1e9,)),), **AXES),
    ],
    ids=lambda chart: chart.kind,
)
@pytest.mark.parametrize("width", [FULL_WIDTH, NARROW_WIDTH])
def test_odd_but_real_values_can_be_drawn(chart: Chart, width: int) -> None:
    assert not chart.empty
    assert "nan" not in ET.tostring(draw(chart, width), "unicode").lower()


@pytest.mark.parametrize(
    "make",
    [
        lambda: GroupedBars(title="t", categories=("a",), series=(Series(name="s", values=(1, 2)),)),
        lambda: Histogram(title="t", edges=(0, 1), series=(Series(name="s", values=(1, 2)),), **AXES),
        lambda: Histogram(title="t", edges=(0, 0), series=(Series(name="s", values=(1,)),), **AXES),
        lambda: Lines(title="t", lines=(Line(name="l", x=(0, 1), y=(1,)),), **AXES),
        lambda: Lines(title="t", lines=(Line(name="l", x=(0,), y=(1,), low=(0,)),), **AXES),
        lambda: Funnel(title="t", steps=(Step(label="a", count=-1),)),
    ],
)
def test_a_chart_that_contradicts_itself_is_refused(make: Any) -> None:
    with pytest.raises(ValidationError):
        make()
