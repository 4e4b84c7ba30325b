"""Listeners that show a run as it happens: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol, Self

from headwater.pipelines.pace import Pace, duration

PLAIN_SECONDS = 30.0
"""Between two lines about the running stages when there is no terminal to draw on."""


class Display(Protocol):
    """Shows events; used as a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, event: Mapping[str, Any]) -> None: ...


def open_display(stream: IO[str] | None = None) -> Display:
    """Bars when `stream` (stderr) is a terminal, plain lines otherwise."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        from headwater.pipelines.bars import Bars

        return Bars(stream)
    return PlainLines(stream)


class Story:
    """Turns events into the lines worth printing, and keeps the pace of every running stage."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.running: dict[str, Pace] = {}
        self._say = say
        self._reused: list[str] = []
        self._stages = 0
        self._owed: dict[str, int] = {}

    def hear(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event)

    def _on_run_started(self, event: Mapping[str, Any]) -> None:
        self._stages = len(event["stages"])
        self._say(f"Run {event['run']}: {self._stages} stages.")

    def _on_stage_started(self, event: Mapping[str, Any]) -> None:
        self.tell_reused()
        self.running[event["stage"]] = Pace(event["stage"], float(event["time"]))
        self._say(f"{event['stage']}: started.")

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        pace = self.running.setdefault(event["stage"], Pace(event["stage"], float(event["time"])))
        pace.update(event)

    def _on_row_owed(self, event: Mapping[str, Any]) -> None:
        stage = event["stage"]
        self._owed[stage] = self._owed.get(stage, 0) + 1
        if self._owed[stage] == 1:
            self._say(f"{stage}: a row failed for now and is owed ({event['why']}). The others go on.")

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self._say(f"{event['stage']}: {event['text']}")

    def _on_stage_finished(self, event: Mapping[str, Any]) -> None:
        self.running.pop(event["stage"], None)
        if event["reused"]:
            self._reused.append(event["stage"])
            return
        counts = event["counts"]
        rejected = f", {counts['rejected']:,} rejected" if counts["rejected"] else ""
        self._say(f"{event['stage']}: {counts['accepted']:,} rows{rejected} in {duration(event['seconds'])}.")

    def tell_reused(self) -> None:
        """Say once which stages were reused since the last time, unless it was all of them: the summary says that."""
        if self._reused and len(self._reused) < self._stages:
            self._say(f"Reused {len(self._reused)} of {self._stages} stages: {', '.join(self._reused)}.")
        self._reused.clear()


class PlainLines:
    """One line when something happens, and one per running stage every 30 s."""

    def __init__(self, stream: IO[str], every_seconds: float = PLAIN_SECONDS) -> None:
        self._stream = stream
        self._every = every_seconds
        self._story = Story(self._say)
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="plain-progress", daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ticker.join()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._story.hear(event)

    def _tick(self) -> None:
        while not self._over.wait(self._every):
            for stage, pace in list(self._story.running.items()):
                self._say(f"{stage}: {pace.describe()}.")

    def _say(self, text: str) -> None:
        self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._stream.flush()
