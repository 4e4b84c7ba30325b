"""What a report is made of, as frozen values. Pipelines fill these in; `report.py` turns them into a page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headwater.data_cards.chart_types import Chart, Frozen

Cell = str | int | float | None


class Headline(Frozen):
    """One number at the top of the report."""

    label: str
    value: float | str | None
    unit: str = ""
    """As in `numbers.format_number`."""
    hint: str = ""
    """What it means, or what to hold it against."""


class Prose(Frozen):
    kind: Literal["prose"] = "prose"
    text: str
    """Paragraphs between empty lines; `code` and **strong** are marked up, nothing else."""


class Note(Frozen):
    """A limit, a doubt or a warning that the reader should not miss."""

    kind: Literal["note"] = "note"
    level: Literal["note", "warning"] = "note"
    title: str
    points: tuple[str, ...] = Field(min_length=1)


class Column(Frozen):
    title: str
    unit: str = ""
    """Unit of the numbers of this column, as in `numbers.format_number`."""


class TableBlock(Frozen):
    """A table that can be sorted by a click on a column's title."""

    kind: Literal["table"] = "table"
    title: str
    caption: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    why_empty: str = "there are no rows"

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers only, hence is aligned and sorted as such."""
        return not any(isinstance(row[column], str) for row in self.rows)

    @model_validator(mode="after")
    def _check(self) -> TableBlock:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, but a row has {len(row)}")
        return self


class Mark(Frozen):
    """A highlighted stretch of a text, as offsets in characters."""

    start: int = Field(ge=0)
    end: int
    label: str = ""


class Example(Frozen):
    text: str
    marks: tuple[Mark, ...] = ()
    """In order and without overlap."""
    badges: tuple[str, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    """Label and value of each further fact."""

    @model_validator(mode="after")
    def _check(self) -> Example:
        at = 0
        for mark in self.marks:
            if not at <= mark.start < mark.end <= len(self.text):
                raise ValueError(f"the mark {mark.start}:{mark.end} doesn't fit the text {self.text[:60]!r}")
            at = mark.end
        return self


class Examples(Frozen):
    """Rows to look at; all but the first few are folded away."""

    kind: Literal["examples"] = "examples"
    title: str
    caption: str = ""
    items: tuple[Example, ...]
    unfolded: int = Field(6, ge=0)
    why_empty: str = "there are no rows"


class Figures(Frozen):
    """One chart, or two side by side on a wide screen."""

    kind: Literal["figures"] = "figures"
    charts: tuple[Chart, ...] = Field(min_length=1, max_length=2)


Block = Annotated[Prose | Note | TableBlock | Examples | Figures, Field(discriminator="kind")]


class Section(Frozen):
    title: str
    blocks: tuple[Block, ...]


class Report(Frozen):
    title: str
    subtitle: str = ""
    lead: str = ""
    """The finding in a few sentences, as `Prose.text`."""
    headlines: tuple[Headline, ...] = ()
    not_shown: tuple[str, ...] = Field(min_length=1)
    """What this report does not show; a report without limits isn't honest."""
    sections: tuple[Section, ...]
    lineage: tuple[tuple[str, str], ...] = ()
    """Label and value: fingerprint, seed, models, versions, date."""
    command: str
    """The command line that makes the run again."""
