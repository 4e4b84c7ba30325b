"""Tables for the terminal that stay readable in a pipe."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 160
"""Characters per line when nobody's window limits them."""


def console() -> Console:
    """Writes to stdout: as wide as the window, or wide enough for tables when it is a pipe."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def plain_table(first: str, *others: str, numbers: bool = False) -> Table:
    """A table without vertical lines. `numbers` aligns all but the first column to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    return table
