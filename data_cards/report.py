"""The report: one static HTML file that opens anywhere, offline, in light and dark, on paper and on a phone.

Its content security policy allows nothing but its own style and the one script that sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from headwater.core.redact import redact_text
from headwater.data_cards import charts
from headwater.data_cards.blocks import (
    Block,
    Cell,
    Column,
    Example,
    Examples,
    Figures,
    Headline,
    Mark,
    Note,
    Prose,
    Report,
    Section,
    TableBlock,
)
from headwater.data_cards.chart_types import (
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
from headwater.data_cards.numbers import format_number

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

__all__ = [
    "Bar",
    "Bars",
    "BeforeAfter",
    "Block",
    "Chart",
    "Column",
    "Example",
    "Examples",
    "Figures",
    "Funnel",
    "GroupedBars",
    "Headline",
    "Histogram",
    "Line",
    "Lines",
    "Mark",
    "Note",
    "Pair",
    "Prose",
    "Reference",
    "Report",
    "Section",
    "Series",
    "Step",
    "TableBlock",
    "render_report",
]

_INLINE = re.compile(r"`([^`\n]+)`|\*\*([^*\n]+)\*\*")


def render_report(report: Report) -> str:
    """The whole page as one string of HTML, ready to be written as UTF-8.

    Everything from the report is escaped, and whatever looks like a credential is replaced.
    """
    style, script = _asset("report.css"), _asset("sort.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        _environment().get_template("report.html.j2").render(report=report, style=style, script=script, digest=digest)
    )
    return redact_text(page)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("headwater.data_cards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": format_number,
        "headline": _headline,
        "prose": _prose,
        "inline": _inline,
        "marked": _marked,
        "cell": _cell,
        "sort_key": _sort_key,
    }
    environment.globals |= {
        "draw": _draw,
        "full_width": charts.FULL_WIDTH,
        "half_width": charts.HALF_WIDTH,
        "narrow_width": charts.NARROW_WIDTH,
    }
    return environment


def _asset(name: str) -> str:
    return (files("headwater.data_cards") / "templates" / name).read_text("utf-8")


def _draw(chart: Chart, width: int, name: str) -> Markup:
    from markupsafe import Markup

    return Markup(charts.draw_chart(chart, width, name))


def _headline(headline: Headline) -> str:
    return headline.value if isinstance(headline.value, str) else format_number(headline.value, headline.unit)


def _prose(text: str) -> Markup:
    from markupsafe import Markup

    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    return Markup("\n").join(Markup("<p>{}</p>").format(_inline(part)) for part in paragraphs)


def _inline(text: str) -> Markup:
    from markupsafe import Markup, escape

    parts, at = [], 0
    for found in _INLINE.finditer(text):
        parts.append(escape(text[at : found.start()]))
        kind = "code" if found[1] is not None else "strong"
        parts.append(Markup(f"<{kind}>{{}}</{kind}>").format(found[1] or found[2]))
        at = found.end()
    return Markup("").join([*parts, escape(text[at:])])


def _marked(example: Example) -> Markup:
    from markupsafe import Markup, escape

    parts, at = [], 0
    for mark in example.marks:
        parts.append(escape(example.text[at : mark.start]))
        title = Markup(' title="{}"').format(mark.label) if mark.label else ""
        parts.append(Markup("<mark{}>{}</mark>").format(title, example.text[mark.start : mark.end]))
        at = mark.end
    return Markup("").join([*parts, escape(example.text[at:])])


def _cell(value: Cell, column: Column) -> str:
    return value if isinstance(value, str) else format_number(value, column.unit)


def _sort_key(value: Cell) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)
