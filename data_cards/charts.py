"""From a chart to inline SVG: drawn twice, for a wide and a narrow page, so that letters keep their size."""

from __future__ import annotations

from html import escape

from headwater.data_cards import svg
from headwater.data_cards.axis_charts import draw_grouped_bars, draw_histogram, draw_lines
from headwater.data_cards.chart_types import Bars, BeforeAfter, Chart, Funnel, GroupedBars, Histogram
from headwater.data_cards.row_charts import draw_bars, draw_before_after, draw_funnel

FULL_WIDTH = 860
HALF_WIDTH = 410
NARROW_WIDTH = 340
_MOST_DESCRIBED = 12
"""Values read out in a chart's description; all of them are in its table."""


def draw_chart(chart: Chart, width: int, name: str) -> str:
    """The chart as one SVG element `width` pixels wide. `name` makes its ids unique on the page.

    Everything that comes from data is escaped. An empty chart is an error of the caller: check `chart.empty` first.
    """
    body, height = _draw(chart, width)
    title_id, text_id = f"{name}-title", f"{name}-text"
    return svg.element(
        "svg",
        svg.element("title", escape(chart.title, quote=False), id=title_id),
        svg.element("desc", escape(_describe(chart), quote=False), id=text_id),
        body,
        viewBox=f"0 0 {width} {height:.0f}",
        width=width,
        height=round(height),
        role="group",
        aria_labelledby=title_id,
        aria_describedby=text_id,
    )


def _draw(chart: Chart, width: int) -> tuple[str, float]:
    if isinstance(chart, GroupedBars):
        return draw_grouped_bars(chart, width)
    if isinstance(chart, Histogram):
        return draw_histogram(chart, width)
    if isinstance(chart, Bars):
        return draw_bars(chart, width)
    if isinstance(chart, Funnel):
        return draw_funnel(chart, width)
    if isinstance(chart, BeforeAfter):
        return draw_before_after(chart, width)
    return draw_lines(chart, width)


def _describe(chart: Chart) -> str:
    titles, rows = chart.numbers()
    told = [f"{row[0]}: " + ", ".join(_told(titles, row)) for row in rows[:_MOST_DESCRIBED]]
    more = f"; and {len(rows) - _MOST_DESCRIBED} more" if len(rows) > _MOST_DESCRIBED else ""
    return "; ".join(told) + more + "."


def _told(titles: list[str], row: list[str]) -> list[str]:
    return [f"{title} {cell}" for title, cell in zip(titles[1:], row[1:], strict=True) if cell]
