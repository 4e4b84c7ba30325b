"""Charts with two axes: grouped bars, histogram, lines with bands and reference lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.data_cards import svg
from headwater.data_cards.chart_types import GroupedBars, Histogram, Line, Lines, Number, Reference, finite, is_number
from headwater.data_cards.numbers import format_number, format_tick
from headwater.data_cards.svg import Scale

_PLOT_HEIGHT = 210
_TOP = 26
"""Room above the plot for the name of the upright axis and the readout of a mark in focus, pixels."""
_RIGHT = 14
_READOUT_Y = 12
_VALUE_ROOM = 30
"""A bar must have this many pixels for its value to be printed over it."""


def draw_grouped_bars(chart: GroupedBars, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    frame = _Frame.plan(finite(chart.values()), chart.unit, width)
    slot = (frame.right - frame.left) / max(len(chart.categories), 1)
    bar = min(slot * 0.74 / max(len(chart.series), 1), 64)
    muted = [series.muted for series in chart.series]
    parts = [frame.grid()]
    for at, category in enumerate(chart.categories):
        middle = frame.left + slot * (at + 0.5)
        start = middle - bar * len(chart.series) / 2
        for number, series in enumerate(chart.series):
            x = start + bar * number
            label = f"{category}, {series.name}: {format_number(series.values[at], chart.unit)}"
            style = svg.series_class(number, muted)
            parts.append(_upright_bar(frame, x + 1, bar - 2, series.values[at], label=label, style=style))
        for row, words in enumerate(svg.wrap(category, slot - 6)):
            parts.append(svg.text(middle, frame.bottom + 17 + 14 * row, words, class_="label", text_anchor="middle"))
    rows = max((len(svg.wrap(category, slot - 6)) for category in chart.categories), default=1)
    return "".join(parts), frame.bottom + 10 + 14 * rows


def draw_histogram(chart: Histogram, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    frame = _Frame.plan(finite(chart.values()), chart.unit, width, x_range=(chart.edges[0], chart.edges[-1]))
    muted = [series.muted for series in chart.series]
    parts = [frame.grid(), frame.x_axis(chart.x_label), frame.y_name(chart.y_label)]
    for number, series in enumerate(chart.series):
        style = svg.series_class(number, muted) + (" over" if number else "")
        for at, (low, high) in enumerate(itertools.pairwise(chart.edges)):
            value = series.values[at]
            if not is_number(value) or not value:
                continue
            shown = f"{format_number(low)} to {format_number(high)}: {format_number(value, chart.unit)}"
            label = f"{series.name}, {shown}" if len(chart.series) > 1 else shown
            x, end, y = frame.x(low), frame.x(high), frame.y(value)
            box = svg.element(
                "rect", x=x + 0.5, y=y, width=max(end - x - 1, 1.0), height=frame.bottom - y, class_=style
            )
            parts.append(svg.point(label, box, readout=frame.readout))
    parts += [_threshold(frame, reference) for reference in chart.references]
    return "".join(parts), frame.bottom + 40


def draw_lines(chart: Lines, width: int) -> tuple[str, float]:
    """Markup and height in pixels."""
    xs = [x for line in chart.lines for x in line.x]
    xs += [reference.at for reference in chart.references]
    heights = [*chart.values(), *(value for line in chart.lines for value in (*line.low, *line.high))]
    heights += [reference.at for reference in chart.references if reference.axis == "y"]
    frame = _Frame.plan(finite(heights), chart.unit, width, x_range=(min(xs), max(xs)))
    muted = [line.muted for line in chart.lines]
    styles = [svg.series_class(number, muted) for number in range(len(chart.lines))]
    parts = [frame.grid(), frame.x_axis(chart.x_label), frame.y_name(chart.y_label)]
    parts += [_band(frame, line, style) for line, style in zip(chart.lines, styles, strict=True)]
    for reference in chart.references:
        parts.append(_level(frame, reference, chart) if reference.axis == "y" else _threshold(frame, reference))
    for line, style in zip(chart.lines, styles, strict=True):
        parts.append(_line(frame, line, style, chart))
    return "".join(parts), frame.bottom + 40


@dataclass(frozen=True)
class _Frame:
    """The plot area, its scales and what surrounds it."""

    left: float
    right: float
    bottom: float
    x: Scale
    y: Scale
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    unit: str

    @staticmethod
    def plan(heights: Sequence[float], unit: str, width: int, x_range: tuple[float, float] = (0, 1)) -> _Frame:
        high = max([*heights, 0.0])
        marks = svg.ticks(min([*heights, 0.0]), high or 1.0, 4)
        if unit == "share" and marks[-1] > 1 >= high:
            marks = [mark for mark in marks if mark <= 1] or [0.0, 1.0]
        if not unit and all(float(height).is_integer() for height in heights):
            marks = [mark for mark in marks if mark.is_integer()]  # no half of a row
        room = max(svg.text_width(format_tick(mark, unit)) for mark in marks) + 14
        x_marks = [mark for mark in svg.ticks(*x_range, max(width // 85, 3)) if x_range[0] <= mark <= x_range[1]]
        right, bottom = width - _RIGHT, _TOP + _PLOT_HEIGHT
        low, top = x_range if x_range[1] > x_range[0] else (x_range[0] - 0.5, x_range[0] + 0.5)
        x = Scale(low, top, room, right)
        y = Scale(marks[0], marks[-1], bottom, _TOP + 8)
        return _Frame(room, right, bottom, x, y, tuple(x_marks), tuple(marks), unit)

    @property
    def readout(self) -> tuple[float, float]:
        return self.right, _READOUT_Y

    def grid(self) -> str:
        parts = []
        for mark in self.y_ticks:
            y = self.y(mark)
            parts.append(svg.line(self.left, y, self.right, y, class_="axis" if mark == 0 else "grid"))
            label = format_tick(mark, self.unit)
            parts.append(svg.text(self.left - 7, y + 4, label, class_="tick", text_anchor="end"))
        return "".join(parts)

    def x_axis(self, name: str) -> str:
        parts = []
        for mark in self.x_ticks:
            x = self.x(mark)
            parts.append(svg.line(x, self.bottom, x, self.bottom + 4, class_="axis"))
            parts.append(svg.text(x, self.bottom + 17, format_tick(mark), class_="tick", text_anchor="middle"))
        middle = (self.left + self.right) / 2
        return "".join(parts) + svg.text(middle, self.bottom + 35, name, class_="name", text_anchor="middle")

    def y_name(self, name: str) -> str:
        return svg.text(0, _READOUT_Y, name, class_="name")


def _upright_bar(frame: _Frame, x: float, width: float, value: Number, *, label: str, style: str) -> str:
    middle = x + width / 2
    if not is_number(value):
        return svg.text(middle, frame.y(0) - 5, "–", class_="value", text_anchor="middle")
    top, bottom = sorted((frame.y(value), frame.y(0)))
    box = svg.element("rect", x=x, y=top, width=width, height=max(bottom - top, 1.0), class_=style)
    shown = format_number(value, frame.unit)
    if width < max(_VALUE_ROOM, svg.text_width(shown) * 0.9):
        return svg.point(label, box, readout=frame.readout)
    return svg.point(label, box) + svg.text(middle, top - 5, shown, class_="value", text_anchor="middle")


def _threshold(frame: _Frame, reference: Reference) -> str:
    x = frame.x(reference.at)
    rule = svg.line(x, _TOP, x, frame.bottom, class_="reference")
    fits = x + 6 + svg.text_width(reference.label) <= frame.right
    anchor, where = ("start", x + 5) if fits else ("end", x - 5)
    return rule + svg.text(where, _TOP + 10, reference.label, class_="note", text_anchor=anchor)


def _level(frame: _Frame, reference: Reference, chart: Lines) -> str:
    """A rule across the plot, its label at the end that is farther from the lines."""
    y = frame.y(reference.at)
    first, last = (
        min((abs(frame.y(value) - y) for value in finite(line.y[end] for line in chart.lines if line.y)), default=0.0)
        for end in (0, -1)
    )
    anchor, where = ("start", frame.left + 4) if first > last else ("end", frame.right)
    rule = svg.line(frame.left, y, frame.right, y, class_="reference")
    return rule + svg.text(where, y - 5, reference.label, class_="note", text_anchor=anchor)


def _band(frame: _Frame, line: Line, style: str) -> str:
    if not line.low:
        return ""
    edges = [
        (frame.x(x), frame.y(low), frame.y(high))
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if is_number(low) and is_number(high)
    ]
    upper = [(x, high) for x, _, high in edges]
    lower = [(x, low) for x, low, _ in reversed(edges)]
    return svg.element("path", d=svg.path([*upper, *lower]) + "Z", class_=f"band {style}") if edges else ""


def _line(frame: _Frame, line: Line, style: str, chart: Lines) -> str:
    parts = []
    points = zip(line.x, line.y, strict=True)
    for _, run in itertools.groupby(points, key=lambda entry: is_number(entry[1])):
        trace = [(frame.x(x), frame.y(y)) for x, y in run if is_number(y)]
        if trace:
            parts.append(svg.element("path", d=svg.path(trace), class_=f"line {style}"))
    for x, y in zip(line.x, line.y, strict=True):
        if is_number(y):
            name = f"{line.name}, " if len(chart.lines) > 1 else ""
            label = f"{name}{chart.x_label} {format_number(x)}: {format_number(y, chart.unit)}"
            dot = svg.element("circle", cx=frame.x(x), cy=frame.y(y), r=3.5, class_=style)
            parts.append(svg.point(label, dot, readout=frame.readout))
    return "".join(parts)
