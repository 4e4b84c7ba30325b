"""Numbers as a reader wants them: three significant digits, thousands separators, a unit where it helps."""

from __future__ import annotations

import math

MISSING = "–"
_MINUS = "−"


def format_number(value: float | None, unit: str = "") -> str:
    """`0.8034` as 0.803, `12345` as 12,345; a missing or undefined value as a dash.

    `unit` is `share` (a fraction, printed as a percentage), `s` (seconds), `bytes`, `$`, or any text to append.
    """
    if value is None or math.isnan(value):
        return MISSING
    if value < 0:
        return _MINUS + format_number(-value, unit)
    if math.isinf(value):
        return "∞"
    special = {"share": _share, "s": _seconds, "bytes": _bytes, "$": _dollars}.get(unit)
    if special is not None:
        return special(value)
    return f"{_plain(value)} {unit}".rstrip()


def format_tick(value: float, unit: str = "") -> str:
    """An axis label: as short as the number allows, without trailing zeros."""
    if unit == "share":
        return f"{value * 100:.6g}%"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    text = text.replace("-", _MINUS)
    return f"${text}" if unit == "$" else text


def _plain(value: float) -> str:
    if isinstance(value, int) or value == int(value) or value >= 1000:
        return f"{value:,.0f}"
    if value < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-").replace("e-", f"e{_MINUS}")
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{max(2 - math.floor(math.log10(rounded)), 0)}f}"


def _share(value: float) -> str:
    """Never rounds something to nothing, nor nearly all to all."""
    percent = value * 100
    if 0 < percent < 0.05:
        return "<0.1%"
    if 99.95 <= percent < 100:
        return ">99.9%"
    return f"{percent:,.0f}%" if percent in (0, 100) or percent >= 1000 else f"{percent:.1f}%"


def _seconds(value: float) -> str:
    if 0 < value < 0.1:
        return "<0.1 s"
    if value < 60:
        return f"{_plain(value)} s"
    whole = round(value)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _bytes(value: float) -> str:
    for name in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{_plain(value)} {name}"
        value /= 1000
    return f"{_plain(value)} TB"


def _dollars(value: float) -> str:
    return "<$0.01" if 0 < value < 0.01 else f"${value:,.2f}"
