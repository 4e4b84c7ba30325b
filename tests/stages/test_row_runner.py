"""Many rows at once: none is lost, none is asked for twice, and the order they end in leaves no trace."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, Plan
from sample_stages import (
    Ask,
    AskConfig,
    LocalEngine,
    Numbers,
    NumbersConfig,
    Pool,
    RemoteEngine,
    context,
    cut,
    of_the_batch,
    of_the_request,
)

from headwater.core.errors import BadOutput, PermanentError, Stopped, TransientError
from headwater.core.journal import Entry, Journal
from headwater.core.meter import Meter, Price, Reading
from headwater.core.rows import row_id
from headwater.core.store import StageOutput
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Completion, Message, Sampling, Usage
from headwater.stages import row_runner
from headwater.stages.run import fingerprint_of, run_stage


@pytest.fixture
def numbers(tmp_path: Path) -> Callable[[int], dict[str, StageOutput]]:
    """So many numbered rows, as the input `rows`."""
    return lambda rows: {"rows": run_stage(Numbers(NumbersConfig(rows=rows)), {}, context(tmp_path)).output}


def _shard(output: StageOutput) -> bytes:
    (path,) = output.data_files
    return path.read_bytes()


def _journalled(root: Path) -> int:
    (path,) = root.glob("stages/.journals/*.sqlite")
    with Journal(path) as journal:
        return len(journal.keys())


def _opens(engine: LocalEngine) -> Callable[[], LocalEngine]:
    return lambda: engine


def _count(request: ChatRequest) -> int:
    return int(request.messages[-1].content.removeprefix("What about ").removesuffix("?"))


@pytest.mark.parametrize("engine", [RemoteEngine, LocalEngine])
def test_every_row_becomes_what_the_engine_said_in_input_order(tmp_path: Path, numbers: Any, engine: Any) -> None:
    output = run_stage(Ask(AskConfig()), numbers(20), context(tmp_path, Pool(engine=engine))).output
    assert output.read()["number"].to_list() == [n for n in range(20) if n != 13]
    assert output.rejects().select("reason", "detail").rows() == [("unlucky", "thirteen")]
    assert output.manifest["counts"] == {"attempted": 20, "accepted": 19, "rejected": 1, "owed": 0}
    asked = [row_id("numbers", [], n) for n in range(20)]
    assert output.read()["id"].to_list() == [row_id("ask", [asked[n]]) for n in range(20) if n != 13]
    assert list(tmp_path.glob("stages/.journals/*")) == []


class _Slow(RemoteEngine):
    """Later rows end first."""

    async def chat(self, requests: Any) -> Any:
        requests = list(requests)
        await asyncio.sleep(0.02 / (1 + _count(requests[0])))
        async for outcome in super().chat(requests):
            yield outcome


def test_neither_concurrency_nor_the_order_of_replies_changes_a_byte(tmp_path: Path, numbers: Any) -> None:
    shards = set()
    for concurrency, engine in [(1, RemoteEngine), (64, RemoteEngine), (64, _Slow)]:
        root = tmp_path / f"{concurrency}{engine.__name__}"
        rows = run_stage(Numbers(NumbersConfig(rows=40)), {}, context(root)).output
        done = run_stage(Ask(AskConfig(concurrency=concurrency)), {"rows": rows}, context(root, Pool(engine=engine)))
        shards.add(_shard(done.output))
    assert len(shards) == 1


def test_seeds_follow_from_the_run_seed_and_the_row(tmp_path: Path, numbers: Any) -> None:
    def seeds(rows: int, seed: int) -> dict[int, int]:
        here = context(tmp_path, Pool(engine=RemoteEngine), seed=seed)
        return dict(run_stage(Ask(AskConfig()), numbers(rows), here).output.read().select("number", "seed").iter_rows())

    few, many, other = seeds(5, 0), seeds(10, 0), seeds(5, 1)
    assert {n: many[n] for n in few} == few
    assert set(few.values()).isdisjoint(other.values())
    assert len(set(many.values())) == 10


def test_a_bad_reply_rejects_its_row_keeps_the_raw_text_and_is_paid_for(tmp_path: Path, numbers: Any) -> None:
    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        return cut(request, ids) if _count(request) < 2 else of_the_request(request, ids)

    meter = Meter({"of-the-request": Price(input=1.0, cached=0.5, output=2.0)})
    pool = Pool(engine=lambda: RemoteEngine(answer))
    output = run_stage(Ask(AskConfig()), numbers(4), context(tmp_path, pool, meter=meter)).output
    assert output.rejects().select("reason", "raw").rows() == [("cut_at_length", "half a \ufffd")] * 2
    assert output.manifest["counts"]["accepted"] == 2
    assert (meter.total.calls, meter.total.tokens_in, meter.total.tokens_out) == (4, 40, 2 * 50 + 2 * 5)
    # per call 6 fresh tokens at $1 and 4 cached at $0.50 per million, and 110 tokens out at $2
    assert output.manifest["meter"]["dollars"] == pytest.approx((4 * (6 + 2) + 110 * 2) / 1e6)


def test_after_too_many_rejects_a_higher_limit_asks_for_nothing_again(tmp_path: Path, numbers: Any) -> None:
    asked: list[str] = []

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        asked.append(request.id)
        return cut(request, ids) if _count(request) % 2 else of_the_request(request, ids)

    rows, pool = numbers(10), Pool(engine=lambda: RemoteEngine(answer))
    with pytest.raises(PermanentError, match="rejected 5 of 10 rows"):
        run_stage(Ask(AskConfig(max_reject_share=0.4)), rows, context(tmp_path, pool))
    output = run_stage(Ask(AskConfig(max_reject_share=0.5)), rows, context(tmp_path, pool)).output
    assert output.rows == 5
    assert len(asked) == 10


def test_a_row_that_became_nothing_is_a_reject(tmp_path: Path, numbers: Any) -> None:
    class Silent(Ask):
        async def process(self, row: Any, call: Any) -> Any:
            return [] if row["number"] == 1 else [{"number": row["number"], "text": "x", "seed": 1}]

    output = run_stage(Silent(AskConfig()), numbers(3), context(tmp_path, Pool(engine=RemoteEngine))).output
    assert output.rejects()["reason"].to_list() == ["no_output"]


def test_a_row_may_become_several_each_with_its_own_id(tmp_path: Path, numbers: Any) -> None:
    class Twins(Ask):
        async def process(self, row: Any, call: Any) -> Any:
            return [{"id": "ignored", "number": row["number"], "text": str(twin), "seed": 0} for twin in range(2)]

    output = run_stage(Twins(AskConfig()), numbers(3), context(tmp_path, Pool(engine=RemoteEngine))).output
    parents = [row_id("numbers", [], n) for n in range(3)]
    assert output.read()["id"].to_list() == [row_id("ask", [parent], twin) for parent in parents for twin in range(2)]
    assert output.manifest["counts"] == {"attempted": 3, "accepted": 3, "rejected": 0, "owed": 0}


class _Flaky:
    """Answers, but fails transiently for the numbers in `down`; counts what it was asked."""

    def __init__(self, down: set[int]) -> None:
        self.down = down
        self.asked: Counter[int] = Counter()

    def __call__(self, request: ChatRequest, ids: Sequence[str]) -> Any:
        number = _count(request)
        self.asked[number] += 1
        return TransientError("The server hung up.") if number in self.down else of_the_request(request, ids)


def test_owed_rows_are_an_error_and_the_next_run_asks_only_for_them(tmp_path: Path, numbers: Any) -> None:
    flaky = _Flaky({2, 7})
    rows, pool = numbers(10), Pool(engine=lambda: RemoteEngine(flaky))
    with pytest.raises(TransientError, match="2 of 10 rows are still owed") as caught:
        run_stage(Ask(AskConfig()), rows, context(tmp_path, pool))
    assert row_id("numbers", [], 2) in caught.value.what or row_id("numbers", [], 7) in caught.value.what
    assert _journalled(tmp_path) == 8

    flaky.down = set()
    output = run_stage(Ask(AskConfig()), rows, context(tmp_path, pool)).output
    assert flaky.asked == {n: 2 if n in (2, 7) else 1 for n in range(10)}
    assert output.read()["number"].to_list() == list(range(10))
    assert output.manifest["meter"]["calls"] == 10


def test_an_engine_that_is_gone_ends_the_stage_early(tmp_path: Path, numbers: Any) -> None:
    flaky = _Flaky(set(range(10, 1_000)))
    with pytest.raises(TransientError, match="the last 50 rows all failed; the last one said: The server hung up"):
        run_stage(Ask(AskConfig()), numbers(500), context(tmp_path, Pool(engine=lambda: RemoteEngine(flaky))))
    assert 60 <= len(flaky.asked) < 75
    assert _journalled(tmp_path) == 10 + 1  # those before the failure, and 13, which asks nothing


def test_a_failure_lets_calls_in_flight_end_because_they_are_paid_for(tmp_path: Path, numbers: Any) -> None:
    class Refusing(RemoteEngine):
        async def chat(self, requests: Any) -> Any:
            requests = list(requests)
            if _count(requests[0]) == 3:
                raise PermanentError("The key was refused.", todo="Set another.")
            await asyncio.sleep(0.1)
            async for outcome in super().chat(requests):
                yield outcome

    with pytest.raises(PermanentError, match="The key was refused"):
        run_stage(Ask(AskConfig(concurrency=8)), numbers(100), context(tmp_path, Pool(engine=Refusing)))
    assert _journalled(tmp_path) == 7


def test_a_fault_of_the_stage_itself_ends_it_as_what_it_is(tmp_path: Path, numbers: Any) -> None:
    class Broken(Ask):
        async def process(self, row: Any, call: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_stage(Broken(AskConfig()), numbers(3), context(tmp_path, Pool(engine=RemoteEngine)))


def test_a_spent_budget_stops_the_stage_and_keeps_everything(tmp_path: Path, numbers: Any) -> None:
    flaky = _Flaky(set())
    rows, pool = numbers(50), Pool(engine=lambda: RemoteEngine(flaky))
    meter = Meter(max_tokens=150)
    with pytest.raises(Stopped, match="tokens used of at most 150"):
        run_stage(Ask(AskConfig(concurrency=4)), rows, context(tmp_path, pool, meter=meter))
    assert meter.total.calls == 10
    assert _journalled(tmp_path) == 10

    output = run_stage(Ask(AskConfig(concurrency=4)), rows, context(tmp_path, pool)).output
    assert set(flaky.asked.values()) == {1}
    assert output.manifest["meter"]["tokens_in"] == 490


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_budget_that_ends_amid_the_calls_of_a_row_has_none_of_them_paid_for_twice(
    tmp_path: Path, numbers: Any, at_once: int
) -> None:
    asked: Counter[str] = Counter()

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        asked[request.id] += 1
        return of_the_request(request, ids)

    rows, config = numbers(8), AskConfig(calls=3, at_once=at_once, concurrency=4)
    calm = run_stage(Ask(config), rows, context(tmp_path / "calm", Pool(engine=RemoteEngine))).output
    pool, stops = Pool(engine=lambda: RemoteEngine(answer)), 0
    while stops < 100:
        try:
            output = run_stage(Ask(config), rows, context(tmp_path, pool, meter=Meter(max_tokens=75))).output
            break
        except Stopped:
            stops += 1
    assert stops == 24 * at_once // 5
    assert asked == dict.fromkeys(asked, 1)
    assert _shard(output) == _shard(calm)
    assert output.manifest["meter"]["calls"] == 24 * at_once == sum(asked.values())
    assert output.manifest["meter"]["tokens_out"] == calm.manifest["meter"]["tokens_out"]


def test_of_a_row_that_is_owed_only_the_call_that_failed_is_asked_again(tmp_path: Path, numbers: Any) -> None:
    down, asked = {2, 7}, Counter[str]()

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        asked[request.id] += 1
        turn = request.id.split("/")[1]
        number = int(request.messages[-1].content.split("?")[0].split()[-1])
        return TransientError("Down.") if turn == "2" and number in down else of_the_request(request, ids)

    rows, pool, config = numbers(10), Pool(engine=lambda: RemoteEngine(answer)), AskConfig(calls=3)
    with pytest.raises(TransientError, match="2 of 10 rows are still owed"):
        run_stage(Ask(config), rows, context(tmp_path, pool))
    down.clear()
    output = run_stage(Ask(config), rows, context(tmp_path, pool)).output
    assert {request: n for request, n in asked.items() if n > 1} == {
        f"{row_id('numbers', [], n)}/2/0": 2 for n in (2, 7)
    }
    assert output.manifest["meter"]["calls"] == 30


def test_a_useless_reply_too_is_kept_while_its_row_is_in_work(tmp_path: Path, numbers: Any) -> None:
    asked: list[int] = []

    class Twice(Ask):
        async def process(self, row: Any, call: Any) -> Any:
            request = ChatRequest("the same", (Message("user", f"What about {row['number']}?"),), Sampling(), 0)
            with pytest.raises(BadOutput, match="The reply was cut") as caught:
                await call.chat(request)
            seen = f"{caught.value.reason}: {caught.value.raw} {(await call.chat(request)).text}"
            return [{"number": row["number"], "text": seen, "seed": 0}]

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        asked.append(_count(request))
        replies = [cut(request, ids), TransientError("Down."), Completion("at last", Usage(10, 0, 3))]
        return replies[len(asked) - 1]

    rows, pool = numbers(1), Pool(engine=lambda: RemoteEngine(answer))
    with pytest.raises(TransientError, match="still owed"):
        run_stage(Twice(AskConfig()), rows, context(tmp_path, pool))
    output = run_stage(Twice(AskConfig()), rows, context(tmp_path, pool)).output
    assert asked == [0, 0, 0]
    assert output.read()["text"].to_list() == ["cut_at_length: half a \ufffd at last"]
    assert output.manifest["meter"]["tokens_out"] == 50 + 3


def test_many_calls_in_flight_do_not_spend_more_than_the_budget(tmp_path: Path, numbers: Any) -> None:
    together: set[int] = set()

    class Watched(_Slow):
        flying = 0

        async def chat(self, requests: Any) -> Any:
            Watched.flying += 1
            together.add(Watched.flying)
            async for outcome in super().chat(requests):
                yield outcome
            Watched.flying -= 1

    meter = Meter({"of-the-request": Price(output=60_000)}, max_cost=10.0)
    with pytest.raises(Stopped, match=r"\$9\.9000 spent of at most \$10\.0000, and one more call may cost \$0\.3000"):
        run_stage(Ask(AskConfig(concurrency=32)), numbers(100), context(tmp_path, Pool(engine=Watched), meter=meter))
    assert meter.total.dollars == pytest.approx(9.9)
    assert meter.total.calls == 33
    assert _journalled(tmp_path) == 34  # the thirteenth is rejected without a call
    assert max(together) > 8


def test_the_stop_flag_is_seen_while_calls_take_long_and_what_ends_in_time_is_kept(
    tmp_path: Path, numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(RemoteEngine):
        async def chat(self, requests: Any) -> Any:
            requests = list(requests)
            await asyncio.sleep(0.6 if _count(requests[0]) % 2 else 60)
            async for outcome in super().chat(requests):
                yield outcome

    monkeypatch.setattr(row_runner, "_GRACE_SECONDS", 1.0)
    stop = threading.Event()
    rows = numbers(50)
    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="Run again to go on"):
        run_stage(Ask(AskConfig(concurrency=8)), rows, context(tmp_path, Pool(engine=Hanging), stop=stop))
    assert time.monotonic() - started < 5
    assert _journalled(tmp_path) == 4


def test_every_window_is_one_batch_per_turn_in_a_fixed_order(tmp_path: Path, numbers: Any) -> None:
    engine = LocalEngine()
    run_stage(Ask(AskConfig(window=4, calls=2)), numbers(6), context(tmp_path, Pool(engine=lambda: engine)))
    ids = [row_id("numbers", [], n) for n in range(6)]
    turns = [[f"{key}/{turn}/0" for key in sorted(window)] for window in (ids[:4], ids[4:]) for turn in (0, 1)]
    assert engine.batches == turns


def test_a_row_that_ends_early_does_not_hold_up_its_window(tmp_path: Path, numbers: Any) -> None:
    engine = LocalEngine()
    output = run_stage(Ask(AskConfig(window=16, calls=3)), numbers(16), context(tmp_path, Pool(engine=lambda: engine)))
    assert [len(batch) for batch in engine.batches] == [15, 15, 15]
    assert output.output.manifest["counts"]["rejected"] == 1


def test_questions_asked_at_once_by_one_row_go_in_one_batch(tmp_path: Path, numbers: Any) -> None:
    engine = LocalEngine()
    run_stage(Ask(AskConfig(window=4, at_once=3)), numbers(4), context(tmp_path, Pool(engine=lambda: engine)))
    assert [len(batch) for batch in engine.batches] == [12]


def test_two_questions_with_one_name_are_a_fault_that_is_told(tmp_path: Path, numbers: Any) -> None:
    class Twice(Ask):
        async def process(self, row: Any, call: Any) -> Any:
            request = ChatRequest("same", (), None, 0)  # type: ignore[arg-type]
            return await call.chat(request)

    with pytest.raises(ValueError, match="two requests with the id 'same'"):
        run_stage(Twice(AskConfig()), numbers(2), context(tmp_path, Pool(engine=LocalEngine)))


def test_a_resumed_run_repeats_whole_windows_hence_the_same_batches_and_bytes(tmp_path: Path, numbers: Any) -> None:
    calm = LocalEngine()
    rows = numbers(20)
    config = AskConfig(window=6, calls=2)
    expected = _shard(run_stage(Ask(config), rows, context(tmp_path, Pool(engine=lambda: calm))).output)

    for killed_at in range(1, len(calm.batches) + 1):
        root = tmp_path / str(killed_at)
        engine = LocalEngine()

        def answer(request: ChatRequest, ids: Sequence[str], engine: LocalEngine = engine, at: int = killed_at) -> str:
            if len(engine.batches) == at and request.id == ids[0]:
                raise KeyboardInterrupt
            return of_the_batch(request, ids)

        engine._answer = answer
        with pytest.raises(KeyboardInterrupt):
            run_stage(Ask(config), rows, context(root, Pool(engine=_opens(engine))))
        again = LocalEngine()
        output = run_stage(Ask(config), rows, context(root, Pool(engine=_opens(again)))).output
        assert _shard(output) == expected
        finished_windows = (killed_at - 1) // 2
        assert again.batches == calm.batches[2 * finished_windows :]


def test_a_window_with_an_owed_row_is_repeated_whole_because_its_batches_were_not_the_usual_ones(
    tmp_path: Path, numbers: Any
) -> None:
    config = AskConfig(window=5, calls=2)
    rows = numbers(10)
    expected = _shard(run_stage(Ask(config), rows, context(tmp_path, Pool(engine=LocalEngine))).output)
    owed = row_id("numbers", [], 6)

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        return TransientError("Out of memory.") if request.id.startswith(owed) else of_the_batch(request, ids)

    root = tmp_path / "again"
    with pytest.raises(TransientError, match="1 of 10 rows are still owed"):
        run_stage(Ask(config), rows, context(root, Pool(engine=lambda: LocalEngine(answer))))
    assert _journalled(root) == 5
    assert _shard(run_stage(Ask(config), rows, context(root, Pool(engine=LocalEngine))).output) == expected


def test_an_engine_that_forgets_a_request_leaves_its_row_owed(tmp_path: Path, numbers: Any) -> None:
    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        return None if _count(request) == 4 else of_the_request(request, ids)

    for engine in (LocalEngine, RemoteEngine):
        root = tmp_path / engine.__name__
        with pytest.raises(TransientError, match="1 of 8 rows are still owed"):
            run_stage(Ask(AskConfig()), numbers(8), context(root, Pool(engine=partial(engine, answer))))
        assert "gave no outcome" in (root / "events.jsonl").read_text()


def test_an_engine_that_breaks_ends_the_window(tmp_path: Path, numbers: Any) -> None:
    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        raise PermanentError("Out of memory for good.")

    started = time.monotonic()
    with pytest.raises(PermanentError, match="for good"):
        run_stage(Ask(AskConfig()), numbers(8), context(tmp_path, Pool(engine=lambda: LocalEngine(answer))))
    assert time.monotonic() - started < 5


def test_a_bad_reply_in_a_window_rejects_its_row_alone(tmp_path: Path, numbers: Any) -> None:
    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        return BadOutput("Nothing.", reason="empty_reply") if _count(request) == 4 else "fine"

    output = run_stage(Ask(AskConfig()), numbers(8), context(tmp_path, Pool(engine=lambda: LocalEngine(answer)))).output
    assert output.rejects()["reason"].to_list() == ["empty_reply"]
    assert output.rows == 7


def test_rows_already_journalled_are_taken_as_they_are(tmp_path: Path, numbers: Any) -> None:
    rows, here = numbers(3), context(tmp_path, Pool(engine=RemoteEngine))
    stage = Ask(AskConfig())
    first = rows["rows"].read()["id"][0]
    kept = {"id": row_id("ask", [first]), "number": 0, "text": "from before", "seed": 7}
    with Journal(here.workspace.journal_path("ask", fingerprint_of(stage, rows, 0, here.engines))) as journal:
        journal.put(Entry(first, True, [kept], Reading(calls=1, tokens_out=99)))
    output = run_stage(stage, rows, here).output
    assert output.read()["text"][0] == "from before"
    assert output.manifest["meter"]["tokens_out"] == 99 + 2 * 5
    assert here.meter.total.tokens_out == 2 * 5


def test_a_remote_engine_is_opened_once_per_thread_and_a_local_one_once(tmp_path: Path) -> None:
    pool = Pool(far=RemoteEngine, near=LocalEngine)
    found: list[tuple[Any, Any]] = [(pool.get("far"), pool.get("near"))]  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: found.append((pool.get("far"), pool.get("near"))))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    (far, near), (other_far, same_near) = found
    assert near is same_near
    assert far is not other_far
    assert pool.get("far") is far  # type: ignore[arg-type]
    asyncio.run(pool.aclose_remote())
    assert pool.get("far") is not far  # type: ignore[arg-type]
    assert pool.get("near") is near  # type: ignore[arg-type]


async def test_behind_a_server_that_misbehaves_every_row_ends_as_data_or_as_a_reject(tmp_path: Path) -> None:
    shares = {"throttle": 0.05, "http_500": 0.03, "close": 0.03, "cut": 0.08, "surrogates": 0.03, "error_in_200": 0.03}
    async with FaultServer(Plan(latency_s=0.005, shares=shares, retry_after="0")) as server:
        pool = Pool(far=lambda: OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=16))

        def work() -> StageOutput:
            rows = run_stage(Numbers(NumbersConfig(rows=100)), {}, context(tmp_path)).output
            return run_stage(
                Ask(AskConfig(engine="far", concurrency=16)), {"rows": rows}, context(tmp_path, pool)
            ).output

        output = await asyncio.to_thread(work)
    assert output.manifest["counts"]["attempted"] == 100
    assert set(output.manifest["reasons"]) == {"cut_at_length", "unlucky"}
    assert output.manifest["reasons"]["cut_at_length"] == server.faults["cut"]
    raw = output.rejects().filter(reason="cut_at_length")["raw"].to_list()
    assert all(text.startswith("reply ") for text in raw)
    texts = output.read()["text"].to_list()
    assert all(text.startswith(("reply ", "broken \ufffd half, whole 😀")) for text in texts)
    assert len(texts) == 100 - len(raw) - 1
    assert max(server.served.values()) == 1
    assert min(server.faults[name] for name in shares) >= 1


def test_a_full_disk_keeps_the_journal_and_with_more_room_the_run_goes_on(small_disk: Callable[[int], Path]) -> None:
    flaky = _Flaky(set())

    def answer(request: ChatRequest, ids: Sequence[str]) -> Any:
        noise = random.Random(flaky(request, ids)).randbytes(5_000).hex()
        return noise

    disk = small_disk(2_048)
    pool = Pool(engine=lambda: RemoteEngine(answer))
    rows = {"rows": run_stage(Numbers(NumbersConfig(rows=300)), {}, context(disk)).output}
    with pytest.raises(PermanentError, match="The disk is full"):
        run_stage(Ask(AskConfig()), rows, context(disk, pool))
    assert list(disk.glob("stages/.unfinished-*")) == []
    kept = _journalled(disk)
    assert 50 < kept < 300

    small_disk(32_768)
    before = flaky.asked.copy()
    output = run_stage(Ask(AskConfig()), rows, context(disk, pool)).output
    assert output.manifest["counts"] == {"attempted": 300, "accepted": 299, "rejected": 1, "owed": 0}
    assert sum((flaky.asked - before).values()) == 300 - kept - (1 if kept <= 13 else 0)
