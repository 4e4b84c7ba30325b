"""How fast a stage is going, from its progress events: rows and tokens per second, and the time that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WINDOW_SECONDS = 60.0
_WINDOW_SHARE = 0.5
"""Engines that decode chats side by side finish them in bursts: over one minute alone a stage seems to stand still."""
_MARKS = 200
"""About how many marks are kept, however often a stage reports."""


@dataclass
class Pace:
    """The progress of one stage. Rates are over the last half of its time and at least the last minute.

    They start at the first event, so that rows found in a journal don't count.
    """

    stage: str
    started: float
    """Unix time."""
    done: int = 0
    total: int | None = None
    dollars: float = 0.0
    """Of the whole run so far."""
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(time, rows done, tokens used) of the progress events within the window."""

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in one progress event."""
        self.done, self.total = int(event["done"]), event.get("total")
        self.dollars = float(event.get("dollars", self.dollars))
        tokens = int(event.get("tokens_in", 0)) + int(event.get("tokens_out", 0))
        now = float(event["time"])
        window = max(_WINDOW_SECONDS, _WINDOW_SHARE * (now - self.started))
        if len(self._marks) > 2 and now - self._marks[-2][0] < window / _MARKS:
            self._marks.pop()
        self._marks.append((now, self.done, tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > window:
            self._marks.popleft()

    @property
    def rows_per_second(self) -> float | None:
        return self._rate(1)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(2) or None

    @property
    def seconds_left(self) -> float | None:
        rate = self.rows_per_second
        return (self.total - self.done) / rate if rate and self.total is not None else None

    def _rate(self, column: int) -> float | None:
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else None

    def describe(self) -> str:
        """`512 of 2,000 rows, 3.1 rows/s, 240 tokens/s, $0.0123, about 8 min left`, as far as known."""
        parts = []
        if self._marks:
            parts.append(f"{self.done:,}" + (f" of {self.total:,} rows" if self.total is not None else " rows"))
        if rate := self.rows_per_second:
            parts.append(f"{rate:,.{1 if rate < 100 else 0}f} rows/s")
        if tokens := self.tokens_per_second:
            parts.append(f"{tokens:,.0f} tokens/s")
        if self.dollars:
            parts.append(f"${self.dollars:,.4f}")
        if (left := self.seconds_left) is not None:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts) or "working"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
