"""A few SVG elements as escaped text, scales and tick marks: all that the charts need to be drawn."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

FONT_SIZE = 12
"""Pixels; the drawing's units are pixels of the page."""
_WIDTH_PER_CHARACTER = 6.9
"""Mean advance of a sans-serif letter at FONT_SIZE, pixels."""
_PIECES = re.compile(r"[^\s-]*-\s*|[^\s-]+\s*")


@dataclass(frozen=True)
class Scale:
    """Maps a range of values linearly onto pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start if span == 0 else self.start + (value - self.low) / span * (self.end - self.start)


def element(name: str, /, *body: str, **attributes: object) -> str:
    """`<name …>body</name>`: attribute values are escaped, the body is not.

    Python's `class_` and `text_anchor` become `class` and `text-anchor`; a value of None leaves the attribute out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(body)}</{name}>" if body else f"<{name}{written}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A text whose baseline starts at (x, y)."""
    return element("text", escape(content, quote=False), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a polyline."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def point(label: str, *shapes: str, readout: tuple[float, float] | None = None) -> str:
    """A mark that the keyboard reaches and a screen reader reads; `readout` is where its label shows on focus."""
    tip = text(*readout, label, class_="tip", text_anchor="end", aria_hidden="true") if readout else ""
    title = element("title", escape(label, quote=False))
    return element("g", title, *shapes, tip, class_="pt", tabindex=0, role="img", aria_label=label)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten) that span [low, high]; the outer ones enclose it."""
    if high <= low:
        high = low + 1
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def text_width(content: str) -> float:
    """Estimated width in pixels at FONT_SIZE; wide East Asian characters count double."""
    letters = sum(1.9 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in content)
    return letters * _WIDTH_PER_CHARACTER


def fit(content: str, width: float) -> str:
    """The text, cut with an ellipsis when it is wider than `width` pixels."""
    if text_width(content) <= width:
        return content
    kept = content
    while kept and text_width(kept) > width - _WIDTH_PER_CHARACTER * 1.5:
        kept = kept[:-1]
    return kept.rstrip() + "…"


def wrap(content: str, width: float, most: int = 3) -> list[str]:
    """The text in at most `most` lines of `width` pixels, broken at spaces and hyphens; cut where it has to be."""
    lines: list[str] = [""]
    for piece in _PIECES.findall(content.strip()):
        if lines[-1] and text_width(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    if len(lines) > most:
        lines = [*lines[: most - 1], "".join(lines[most - 1 :])]
    return [fit(entry.rstrip(), width) for entry in lines]


def series_class(position: int, muted: Sequence[bool]) -> str:
    """The colour class of a series: grey when muted, else the next accent."""
    if muted[position]:
        return "muted"
    return f"s{sum(not flag for flag in muted[:position]) % 5}"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))
