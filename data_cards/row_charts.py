"""Charts with one row per item: bars, funnel, before and after. Labels stand left, or above when the page is narrow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.data_cards import svg
from headwater.data_cards.chart_types import Bars, BeforeAfter, Funnel, Number, Pair, finite, is_number
from headwater.data_cards.numbers import MISSING, format_number, format_tick
from headwater.data_cards.svg import Scale

NARROW = 480
"""Below this width in pixels labels stand above their rows."""
_BAR = 16
_GAP = 12
_LABEL_LINE = 17
_DOT = 5


def draw_bars(chart: Bars, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    values = [format_number(bar.value, chart.unit) for bar in chart.bars]
    rows = _Rows.plan([bar.label for bar in chart.bars], values, width)
    scale = Scale(min([0.0, *finite(chart.values())]), _most(chart.values()), rows.left, rows.right)
    parts = []
    for at, bar in enumerate(chart.bars):
        hint = f" ({bar.hint})" if bar.hint else ""
        label = f"{bar.label}: {values[at]}{hint}"
        parts.append(_bar_row(rows, at, scale, bar.value, label=label, name=bar.label, shown=values[at]))
    return "".join(parts), rows.height(len(chart.bars))


def draw_funnel(chart: Funnel, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    shares = chart.shares()
    shown = [_funnel_value(step.count, share, chart.unit) for step, share in zip(chart.steps, shares, strict=True)]
    rows = _Rows.plan([step.label for step in chart.steps], shown, width)
    scale = Scale(0, _most(chart.values()), rows.left, rows.right)
    parts = []
    for at, step in enumerate(chart.steps):
        hint = f" ({step.hint})" if step.hint else ""
        label = f"{step.label}: {shown[at]}{hint}"
        parts.append(_bar_row(rows, at, scale, step.count, label=label, name=step.label, shown=shown[at]))
    return "".join(parts), rows.height(len(chart.steps))


def draw_before_after(chart: BeforeAfter, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    shown = [_change(pair, chart.unit) for pair in chart.pairs]
    rows = _Rows.plan([pair.label for pair in chart.pairs], shown, width)
    marks = svg.ticks(min([0.0, *finite(chart.values())]), _most(chart.values()), 3 if rows.narrow else 5)
    scale = Scale(marks[0], marks[-1], rows.left + 3 * _DOT, rows.right - 3 * _DOT)
    bottom = rows.height(len(chart.pairs))
    parts = [svg.line(scale(mark), 0, scale(mark), bottom, class_="grid") for mark in marks]
    for mark in marks:
        label = format_tick(mark, chart.unit)
        parts.append(svg.text(scale(mark), bottom + 16, label, class_="tick", text_anchor="middle"))
    for at, pair in enumerate(chart.pairs):
        y = rows.middle(at)
        parts += [rows.name(at, pair.label), rows.value(at, shown[at])]
        if is_number(pair.before) and is_number(pair.after):
            parts.append(svg.line(scale(pair.before), y, scale(pair.after), y, class_="link"))
        for value, name, style in (
            (pair.before, chart.before_name, "muted hollow"),
            (pair.after, chart.after_name, "s0"),
        ):
            if is_number(value):
                dot = svg.element("circle", cx=scale(value), cy=y, r=_DOT, class_=style)
                parts.append(svg.point(f"{pair.label}, {name}: {format_number(value, chart.unit)}", dot))
    return "".join(parts), bottom + 22


@dataclass(frozen=True)
class _Rows:
    """Where labels, marks and values of the rows go."""

    width: int
    left: float
    right: float
    label_room: float

    @staticmethod
    def plan(labels: list[str], values: list[str], width: int) -> _Rows:
        value_room = max((svg.text_width(value) for value in values), default=0) + 10
        if width < NARROW:
            return _Rows(width, 0, width - value_room, width)
        room = min(max((svg.text_width(label) for label in labels), default=0) + 12, width * 0.38)
        return _Rows(width, room, width - value_room, room - 10)

    @property
    def narrow(self) -> bool:
        return self.width < NARROW

    @property
    def step(self) -> float:
        return _BAR + _GAP + (_LABEL_LINE if self.narrow else 0)

    def height(self, count: int) -> float:
        return count * self.step

    def top(self, at: int) -> float:
        return at * self.step + _GAP / 2 + (_LABEL_LINE if self.narrow else 0)

    def middle(self, at: int) -> float:
        return self.top(at) + _BAR / 2

    def name(self, at: int, label: str) -> str:
        shown = svg.fit(label, self.label_room)
        if self.narrow:
            return svg.text(0, self.top(at) - 5, shown, class_="label")
        return svg.text(self.left - 10, self.middle(at) + 4, shown, class_="label", text_anchor="end")

    def value(self, at: int, shown: str, x: float | None = None) -> str:
        where = self.width if x is None else x
        anchor = "end" if x is None else "start"
        return svg.text(where, self.middle(at) + 4, shown, class_="value", text_anchor=anchor)


def _bar_row(rows: _Rows, at: int, scale: Scale, value: Number, *, label: str, name: str, shown: str) -> str:
    if not is_number(value):
        return rows.name(at, name) + rows.value(at, shown, rows.left + 2)
    start, end = sorted((scale(0), scale(value)))
    bar = svg.element("rect", x=start, y=rows.top(at), width=max(end - start, 1.0), height=_BAR, rx=2, class_="s0")
    return rows.name(at, name) + svg.point(label, bar) + rows.value(at, shown, end + 7)


def _funnel_value(count: int, share: Number, unit: str) -> str:
    return format_number(count, unit) + (f" · {format_number(share, 'share')}" if share is not None else "")


def _change(pair: Pair, unit: str) -> str:
    if not is_number(pair.before) and not is_number(pair.after):
        return MISSING
    return f"{format_number(pair.before, unit)} → {format_number(pair.after, unit)}"


def _most(values: Iterable[Number]) -> float:
    return max([*finite(values), 0.0]) or 1.0
