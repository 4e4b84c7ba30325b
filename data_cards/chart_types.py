"""Charts as frozen values: what to show, never how it looks. Every chart can give its numbers as a plain table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.data_cards.numbers import format_number

Number = float | None
NumberTable = tuple[list[str], list[list[str]]]
"""Column titles, and rows of cells ready to print."""


class Frozen(BaseModel):
    """Base of all that goes into a report: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChartBase(Frozen):
    title: str
    caption: str = ""
    """What to read off, and how it was computed."""
    unit: str = ""
    """Unit of the values, as in `numbers.format_number`."""
    why_empty: str = "there are no values"
    """Completes the sentence "Nothing to show because …" when the chart has no finite value."""

    def values(self) -> Iterator[Number]:
        """Every value the chart would draw."""
        raise NotImplementedError

    def numbers(self) -> NumberTable:
        """The same facts as a table."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        return not finite(self.values())

    @property
    def legend(self) -> list[tuple[str, bool]]:
        """Name of each series and whether it is muted; empty when there is only one."""
        return []


class Series(Frozen):
    name: str
    values: tuple[Number, ...]
    muted: bool = False
    """Drawn in grey: a baseline, a null, the state before."""


class GroupedBars(ChartBase):
    """Upright bars in groups: a few categories, a few series."""

    kind: Literal["grouped_bars"] = "grouped_bars"
    categories: tuple[str, ...]
    series: tuple[Series, ...]

    @model_validator(mode="after")
    def _check(self) -> GroupedBars:
        _same_length(self.title, len(self.categories), (series.values for series in self.series))
        return self

    def values(self) -> Iterator[Number]:
        return itertools.chain.from_iterable(series.values for series in self.series)

    def numbers(self) -> NumberTable:
        rows = [
            [category, *(format_number(series.values[at], self.unit) for series in self.series)]
            for at, category in enumerate(self.categories)
        ]
        return ["", *(series.name for series in self.series)], rows

    @property
    def legend(self) -> list[tuple[str, bool]]:
        return _legend((series.name, series.muted) for series in self.series)


class Bar(Frozen):
    label: str
    value: Number
    hint: str = ""


class Bars(ChartBase):
    """Horizontal bars in the order given: many categories, long names."""

    kind: Literal["bars"] = "bars"
    bars: tuple[Bar, ...]

    def values(self) -> Iterator[Number]:
        return (bar.value for bar in self.bars)

    def numbers(self) -> NumberTable:
        return ["", "value", "note"], [[bar.label, format_number(bar.value, self.unit), bar.hint] for bar in self.bars]


class Step(Frozen):
    label: str
    count: int = Field(ge=0)
    hint: str = ""


class Funnel(ChartBase):
    """How many are left after each step, and which share of the step before that is."""

    kind: Literal["funnel"] = "funnel"
    caption: str = "Percentages are of the step before."
    steps: tuple[Step, ...]

    def values(self) -> Iterator[Number]:
        return (step.count for step in self.steps)

    def shares(self) -> list[Number]:
        """Share of the step before, None for the first step and after an empty one."""
        pairs = itertools.pairwise(step.count for step in self.steps)
        return [None, *(after / before if before else None for before, after in pairs)]

    def numbers(self) -> NumberTable:
        rows = [
            [step.label, format_number(step.count, self.unit), format_number(share, "share"), step.hint]
            for step, share in zip(self.steps, self.shares(), strict=False)
        ]
        return ["step", "count", "of the step before", "note"], rows


class Pair(Frozen):
    label: str
    before: Number
    after: Number


class BeforeAfter(ChartBase):
    """Two dots per row on one axis."""

    kind: Literal["before_after"] = "before_after"
    pairs: tuple[Pair, ...]
    before_name: str = "before"
    after_name: str = "after"

    def values(self) -> Iterator[Number]:
        return itertools.chain.from_iterable((pair.before, pair.after) for pair in self.pairs)

    def numbers(self) -> NumberTable:
        rows = [
            [pair.label, format_number(pair.before, self.unit), format_number(pair.after, self.unit)]
            for pair in self.pairs
        ]
        return ["", self.before_name, self.after_name], rows

    @property
    def legend(self) -> list[tuple[str, bool]]:
        return [(self.before_name, True), (self.after_name, False)]


class Reference(Frozen):
    """A line that marks one value of an axis: a threshold, a null, a default."""

    at: float
    label: str
    axis: Literal["x", "y"] = "x"


class Histogram(ChartBase):
    """Counts between edges; several series are laid over one another."""

    kind: Literal["histogram"] = "histogram"
    edges: tuple[float, ...]
    """Ascending, one more than the values of a series."""
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    references: tuple[Reference, ...] = ()
    """Of the x axis."""

    @model_validator(mode="after")
    def _check(self) -> Histogram:
        if any(reference.axis == "y" for reference in self.references):
            raise ValueError(f"{self.title!r} can only mark values of its x axis")
        _same_length(self.title, max(len(self.edges) - 1, 0), (series.values for series in self.series))
        if any(high <= low for low, high in itertools.pairwise(self.edges)):
            raise ValueError(f"the edges of {self.title!r} don't ascend")
        return self

    def values(self) -> Iterator[Number]:
        return itertools.chain.from_iterable(series.values for series in self.series)

    def numbers(self) -> NumberTable:
        rows = [
            [
                f"{format_number(low)} to {format_number(high)}",
                *(format_number(series.values[at], self.unit) for series in self.series),
            ]
            for at, (low, high) in enumerate(itertools.pairwise(self.edges))
        ]
        return [self.x_label, *(series.name for series in self.series)], rows

    @property
    def empty(self) -> bool:
        return not any(finite(self.values()))

    @property
    def legend(self) -> list[tuple[str, bool]]:
        return _legend((series.name, series.muted) for series in self.series)


class Line(Frozen):
    name: str
    x: tuple[float, ...]
    y: tuple[Number, ...]
    """A missing value leaves a gap."""
    low: tuple[Number, ...] = ()
    high: tuple[Number, ...] = ()
    """Edges of the band around the line, both or neither."""
    muted: bool = False


class Lines(ChartBase):
    """Lines over a numeric axis, with bands and reference lines: a sweep, a curve of a run."""

    kind: Literal["lines"] = "lines"
    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    references: tuple[Reference, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Lines:
        for line in self.lines:
            bands = (band for band in (line.low, line.high) if band)
            _same_length(f"{self.title}: {line.name}", len(line.x), (line.y, *bands))
            if bool(line.low) != bool(line.high):
                raise ValueError(f"the line {line.name!r} of {self.title!r} has half a band")
        return self

    def values(self) -> Iterator[Number]:
        return itertools.chain.from_iterable(line.y for line in self.lines)

    def numbers(self) -> NumberTable:
        points = sorted({x for line in self.lines for x in line.x})
        known = [dict(zip(line.x, line.y, strict=True)) for line in self.lines]
        rows = [[format_number(x), *(format_number(line.get(x), self.unit) for line in known)] for x in points]
        return [self.x_label, *(line.name for line in self.lines)], rows

    @property
    def legend(self) -> list[tuple[str, bool]]:
        return _legend((line.name, line.muted) for line in self.lines)


Chart = Annotated[GroupedBars | Bars | Funnel | BeforeAfter | Histogram | Lines, Field(discriminator="kind")]


def is_number(value: Number) -> TypeGuard[float]:
    """Whether there is a finite value to draw."""
    return value is not None and math.isfinite(value)


def finite(values: Iterable[Number]) -> list[float]:
    """The values that can be drawn."""
    return [value for value in values if is_number(value)]


def _legend(entries: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    named = list(entries)
    return named if len(named) > 1 else []


def _same_length(title: str, length: int, parts: Iterable[Sequence[Number]]) -> None:
    for part in parts:
        if len(part) != length:
            raise ValueError(f"{title!r} needs {length} values in every series, but one has {len(part)}")
