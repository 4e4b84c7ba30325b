"""What is happening: one JSON line per event on disk, and listeners that draw it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

Listener = Callable[[Mapping[str, Any]], None]
_PROGRESS_SECONDS = 1.0


class EventLog:
    """Appends events to a file and tells the listeners. A damaged last line (a crash) is skipped when read back."""

    def __init__(self, path: Path | None = None, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self._lock = threading.Lock()
        self._last_progress: dict[str, float] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event. `kind` is a snake_case word; the other fields must be plain JSON."""
        event = {"time": round(time.time(), 3), "kind": kind, **fields}
        with self._lock:
            if self._file is not None:
                self._file.write(orjson.dumps(event) + b"\n")
        for listener in self._listeners:
            listener(event)

    def progress(self, stage: str, done: int, total: int | None, **fields: Any) -> None:
        """Record how far `stage` is: at most once a second, and always when it reaches `total`."""
        now = time.monotonic()
        if done != total and now - self._last_progress.get(stage, 0.0) < _PROGRESS_SECONDS:
            return
        self._last_progress[stage] = now
        self.emit("progress", stage=stage, done=done, total=total, **fields)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events on disk, oldest first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
