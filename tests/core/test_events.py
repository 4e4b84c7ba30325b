"""The diary of a run can be read back whatever happened to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headwater.core.events import EventLog, read_events


def _kinds(path: Path) -> list[str]:
    return [event["kind"] for event in read_events(path)]


def test_events_come_back_in_order_with_their_fields(tmp_path: Path) -> None:
    heard: list[Mapping[str, Any]] = []
    log = EventLog(tmp_path / "run" / "events.jsonl", (heard.append,))
    log.emit("a", stage="s", n=1)
    log.emit("b")
    log.close()
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [(event["kind"], event.get("n")) for event in events] == [("a", 1), ("b", None)]
    assert events == heard
    assert events[0]["time"] > 1_700_000_000


def test_a_cut_last_line_is_skipped_and_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("a")
    log.emit("b")
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert _kinds(path) == ["a"]
    log = EventLog(path)
    log.emit("c")
    log.close()
    assert _kinds(path) == ["a", "c"]


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"a"}\n12\n\n\xff\xfe\n{"kind":"b"}\n')
    assert _kinds(path) == ["a", "b"]
    assert list(read_events(tmp_path / "none.jsonl")) == []


def test_what_json_cannot_hold_is_still_told(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("note", text="half \ud800", where=tmp_path)
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["where"] == str(tmp_path)


def test_progress_is_thinned_out_but_the_end_is_always_told(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for done in range(1_001):
        log.progress("s", done, 1_000)
    log.close()
    told = [event["done"] for event in read_events(tmp_path / "events.jsonl")]
    assert told[-1] == 1_000
    assert len(told) <= 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_silences_the_diary_but_ends_nothing() -> None:
    heard: list[Mapping[str, Any]] = []
    log = EventLog(Path("/dev/full"), (heard.append,))
    log.emit("a")
    assert len(heard) == 1


def test_two_processes_write_whole_lines(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from headwater.core.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for i in range(500): log.emit('e', who=sys.argv[2], pad='x' * 300)\n"
    )
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), who]) for who in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert len(list(read_events(path))) == len(path.read_bytes().splitlines()) == 1_000
