from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from headwater.pipelines.bars import Bars
from headwater.pipelines.pace import Pace, duration
from headwater.pipelines.progress import PlainLines, Story, open_display


def progress(at: float, done: int, total: int | None = 100, **more: Any) -> dict[str, Any]:
    return {"time": at, "kind": "progress", "stage": "s", "done": done, "total": total, **more}


def test_the_pace_is_rows_and_tokens_over_the_time_between_events() -> None:
    pace = Pace("s", started=0.0)
    pace.update(progress(10.0, 20, tokens_in=100, tokens_out=0))
    pace.update(progress(20.0, 40, tokens_in=200, tokens_out=400, dollars=0.5))

    assert pace.rows_per_second == 2.0
    assert pace.tokens_per_second == 50.0
    assert pace.seconds_left == 30.0
    assert pace.describe() == "40 of 100 rows, 2.0 rows/s, 50 tokens/s, $0.5000, about 30 s left"


def test_rows_found_in_the_journal_do_not_make_the_pace_look_fast() -> None:
    pace = Pace("s", started=0.0)
    pace.update(progress(1.0, 90))
    pace.update(progress(6.0, 95))

    assert pace.rows_per_second == 1.0
    assert pace.seconds_left == 5.0


def test_the_pace_forgets_what_is_older_than_a_minute() -> None:
    pace = Pace("s", started=0.0)
    for at, done in ((0.0, 0), (1.0, 60), (70.0, 61), (130.0, 91)):
        pace.update(progress(at, done))

    assert pace.rows_per_second == 0.5


def test_one_event_alone_promises_nothing() -> None:
    pace = Pace("s", started=0.0)
    assert pace.describe() == "working"
    pace.update(progress(1.0, 5, total=None))

    assert pace.seconds_left is None
    assert pace.describe() == "5 rows"


def test_durations_read_like_durations() -> None:
    assert [duration(s) for s in (0.04, 9.94, 9.96, 59.4, 59.6, 61, 3599.6, 7620)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "59 s",
        "1 min 00 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 07 min",
    ]


def started(stage: str) -> dict[str, Any]:
    return {"time": 1.0, "kind": "stage_started", "stage": stage, "fingerprint": "f", "pid": 1}


def finished(stage: str, *, reused: bool = False, rejected: int = 0) -> dict[str, Any]:
    counts = {"attempted": 5, "accepted": 5 - rejected, "rejected": rejected, "owed": 0}
    return {
        "time": 2.0,
        "kind": "stage_finished",
        "stage": stage,
        "reused": reused,
        "counts": counts,
        "seconds": 1.0,
        "output": "o",
        "meter": {},
    }


def told(*events: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    story = Story(lines.append)
    for event in events:
        story.hear(event)
    return lines


def test_the_story_names_stages_as_they_start_and_end() -> None:
    begun = {"time": 0.0, "kind": "run_started", "run": "p/1", "stages": ["a", "b", "c"]}

    assert told(begun, finished("a", reused=True), started("b"), finished("b", rejected=2)) == [
        "Run p/1: 3 stages.",
        "Reused 1 of 3 stages: a.",
        "b: started.",
        "b: 3 rows, 2 rejected in 1.0 s.",
    ]


def test_the_story_of_a_run_that_reuses_everything_is_short() -> None:
    begun = {"time": 0.0, "kind": "run_started", "run": "p/1", "stages": ["a", "b"]}

    assert told(begun, finished("a", reused=True), finished("b", reused=True)) == ["Run p/1: 2 stages."]


def test_the_first_owed_row_is_told_and_the_rest_are_not() -> None:
    owed = {"time": 1.0, "kind": "row_owed", "stage": "s", "row": "r", "why": "HTTP 500"}

    assert told(owed, owed, owed) == ["s: a row failed for now and is owed (HTTP 500). The others go on."]


def test_an_event_nobody_knows_is_passed_over() -> None:
    assert told({"time": 0.0, "kind": "something_new"}) == []


def test_without_a_terminal_running_stages_get_a_line_every_so_often() -> None:
    stream = io.StringIO()
    display = PlainLines(stream, every_seconds=0.05)
    with display:
        display(started("s"))
        display(progress(1.0, 10))
        display(progress(2.0, 20))
        time.sleep(0.2)
        display(finished("s"))
    lines = stream.getvalue().splitlines()

    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert "s: 20 of 100 rows, 10.0 rows/s, about 8.0 s left." in stream.getvalue()
    assert lines[-1].endswith("s: 5 rows in 1.0 s.")


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(open_display(io.StringIO()), PlainLines)


def test_on_a_terminal_a_bar_shows_rows_rates_cost_and_what_is_left() -> None:
    stream = io.StringIO()
    bars = Bars(stream)
    bars._progress.live.auto_refresh = False
    bars._console = bars._progress.live.console = Console(file=stream, force_terminal=True, width=140)
    bars(started("generate"))
    for at, done, tokens in ((1.0, 100, 1_000), (11.0, 150, 6_000)):
        bars({**progress(at, done, total=400, tokens_out=tokens, dollars=0.25), "stage": "generate"})
    bars._console.print(bars._progress.get_renderable())
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())

    assert "generate" in drawn
    assert "150/400" in drawn
    assert "5.0 rows/s" in drawn
    assert "500 tok/s" in drawn
    assert "$0.2500" in drawn
    assert "50 s left" in drawn


def test_a_bar_goes_when_its_stage_has_ended() -> None:
    bars = Bars(io.StringIO())
    bars(started("a"))
    bars(finished("a"))

    assert bars._progress.tasks == []


def test_a_stage_that_finishes_rows_in_bursts_keeps_a_steady_estimate() -> None:
    pace = Pace("s", started=0.0)
    for minute in range(0, 9, 2):  # 64 rows every two minutes, with a row-less report in between
        pace.update({"time": 60.0 * minute, "done": 32 * minute, "total": 320})
        pace.update({"time": 60.0 * minute + 70, "done": 32 * minute, "total": 320})

    assert pace.seconds_left is not None
    assert 60 < pace.seconds_left < 300, "64 rows are left, at about 32 a minute"
