"""Where claims write what they measured: one section each in RESULTS.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
_HEAD = """# What the claims measured

Written by `make claims`: real models, fixed seeds. A number that did not come out stands here too.
"""


def record(title: str, setting: str, columns: Sequence[str], rows: Sequence[Sequence[object]], reading: str) -> None:
    """Write or replace the section `title`: how it was measured, a table, and what may be read from it."""
    table = [_line(columns), _line(["---"] * len(columns)), *(_line([_cell(value) for value in row]) for row in rows)]
    section = "\n".join([f"## {title}", "", setting, "", *table, "", reading, ""])
    text = RESULTS.read_text("utf-8") if RESULTS.exists() else _HEAD
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    text = pattern.sub("", text).rstrip() + "\n\n" + section
    RESULTS.write_text(text, "utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
