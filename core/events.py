"""What is happening: one JSON line per event on disk, and listeners that draw it."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

Listener = Callable[[Mapping[str, Any]], None]
_PROGRESS_SECONDS = 1.0


class EventLog:
    """Appends events to a file and tells the listeners. A damaged last line (a crash) is skipped when read back."""

    def __init__(self, path: Path | None = None, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self._lock = threading.Lock()
        self._last_progress: dict[str, float] = {}
        self._file: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            _end_last_line(self._file)

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event. `kind` is a snake_case word; the other fields must be plain JSON."""
        event = {"time": round(time.time(), 3), "kind": kind, **fields}
        line = _line(event)
        with self._lock:
            if self._file is not None:
                self._write(self._file, line)
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

    @staticmethod
    def _write(file: BinaryIO, line: bytes) -> None:
        """One write, so that two processes never mix their lines."""
        try:
            file.write(line)
        except OSError as error:
            # A full disk is told by the work that needs it; a diary must not end that work, nor hide its error.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events on disk, oldest first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield event


def _line(event: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(event) + b"\n"
    except TypeError:  # a lone surrogate in somebody's error message, or a number type of some library
        return json.dumps(event, default=str, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _end_last_line(file: BinaryIO) -> None:
    """A crash may have cut the last line: what comes next must not be glued to it."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
