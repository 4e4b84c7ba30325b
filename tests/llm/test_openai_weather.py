"""The HTTP engine in bad weather: many calls, many faults, and every row accounted for."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.core.errors import BadOutput, TransientError
from headwater.llm.http_gate import FAILURES_TO_OPEN
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, Message, Sampling
from headwater.tests.llm import fault_server
from headwater.tests.llm.fault_server import FaultServer, Plan, key_of, reply_to

SAMPLING = Sampling()


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    async with FaultServer() as running:
        yield running


def requests(count: int) -> list[ChatRequest]:
    return [ChatRequest(f"r{n}", (Message("user", f"row {n}"),), SAMPLING, seed=n) for n in range(count)]


def body_of(request: ChatRequest) -> dict[str, Any]:
    """What the server sees of a request, written out here once more, independently of the engine."""
    return {
        "messages": [{"role": "user", "content": request.messages[0].content}],
        "seed": request.seed,
        "temperature": SAMPLING.temperature,
        "top_p": SAMPLING.top_p,
        "max_tokens": SAMPLING.max_tokens,
    }


async def outcomes_of(engine: OpenAIEngine, asked: Iterable[ChatRequest]) -> dict[str, ChatOutcome]:
    seen = [outcome async for outcome in engine.chat(asked)]
    assert len({outcome.request_id for outcome in seen}) == len(seen), "a request got two outcomes"
    return {outcome.request_id: outcome for outcome in seen}


async def test_2000_calls_with_every_common_fault_end_with_every_row_accounted_for(server: FaultServer) -> None:
    shares = {"error_in_200": 0.01, "cut": 0.01, "throttle": 0.05, "http_500": 0.02}
    server.plan = Plan(latency_s=0.005, shares=shares, retry_after="0.02")
    asked = requests(2000)
    engine = OpenAIEngine(base_url=server.base_url, model="fake")
    outcomes = await outcomes_of(engine, asked)
    await engine.aclose()

    assert set(outcomes) == {request.id for request in asked}
    assert all(server.faults[fault] >= 10 for fault in shares), "the weather was not bad enough to prove anything"
    kinds: Counter[str] = Counter()
    for request in asked:
        result, key = outcomes[request.id].result, key_of(body_of(request))
        if isinstance(result, Completion):
            assert result.text == reply_to(body_of(request))
            assert server.served[key] == 1, "a row was paid for twice"
        else:
            assert isinstance(result, BadOutput)
            assert result.reason == "cut_at_length"
            assert server.served[key] == 0
        kinds[type(result).__name__] += 1
    assert kinds["BadOutput"] == server.faults["cut"]
    assert kinds["Completion"] == 2000 - server.faults["cut"]
    assert server.asked.total() == 2000 + server.faults.total() - server.faults["cut"]


async def test_concurrency_falls_to_what_the_server_bears_and_rises_again(server: FaultServer) -> None:
    server.plan = Plan(latency_s=0.02, capacity=8, retry_after="0.02")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=64)
    limits: list[int] = []
    async for outcome in engine.chat(requests(400)):
        assert isinstance(outcome.result, Completion)
        limits.append(engine.concurrency)
    assert server.faults["throttle"] > 0
    settled = limits[100:]
    assert max(settled) <= 16, "twice of what the server bears is the most that additive increase may try"
    assert server.faults["throttle"] < 400, "more refusals than answers is no adaptation"

    server.plan = Plan(latency_s=0.05)  # so slow that the calls in flight show the limit and not the client's speed
    server.reset_peak()
    assert len(await outcomes_of(engine, requests(1500))) == 1500
    await engine.aclose()
    assert engine.concurrency == 64
    assert server.peak > 48


async def test_the_breaker_pauses_while_the_server_is_down_and_nothing_is_lost(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.plan = Plan(latency_s=0.02)
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=32, attempts=2)
    work = asyncio.create_task(outcomes_of(engine, requests(400)))
    while server.served.total() < 100:
        await asyncio.sleep(0.01)
    await server.stop()
    await asyncio.sleep(1.5)
    assert not work.done()
    await server.start()
    outcomes = await asyncio.wait_for(work, 30)
    await engine.aclose()
    assert len(outcomes) == 400
    assert all(isinstance(outcome.result, Completion) for outcome in outcomes.values())
    messages = [record.getMessage() for record in caplog.records]
    (paused,) = [message for message in messages if f"failed {FAILURES_TO_OPEN} times in a row" in message]
    assert "Nothing is lost" in paused
    assert sum("answers again" in message for message in messages) == 1


async def test_while_the_breaker_is_open_the_server_sees_one_probe_at_a_time(server: FaultServer) -> None:
    server.plan = Plan(always="http_500")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=32)
    work = asyncio.create_task(outcomes_of(engine, requests(32)))
    await asyncio.sleep(0.4)
    before = server.asked.total()
    server.reset_peak()
    await asyncio.sleep(1.6)
    assert before <= 32
    assert server.asked.total() - before == 1
    assert server.peak == 1
    server.plan = Plan()
    outcomes = await asyncio.wait_for(work, 30)
    await engine.aclose()
    assert all(isinstance(outcome.result, Completion) for outcome in outcomes.values())


async def test_when_the_server_never_comes_back_every_request_says_so(server: FaultServer) -> None:
    engine = OpenAIEngine(base_url=server.base_url, model="fake", deadline_s=1, patience_s=1)
    await server.stop()
    outcomes = await asyncio.wait_for(outcomes_of(engine, requests(100)), 20)
    await engine.aclose()
    results = [outcome.result for outcome in outcomes.values()]
    assert len(results) == 100
    assert {type(result) for result in results} == {TransientError}
    assert all("everything finished is kept" in str(result) for result in results)


async def test_a_server_overloaded_for_a_while_costs_no_row(server: FaultServer) -> None:
    server.plan = Plan(always="overloaded")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=16, attempts=1)
    work = asyncio.create_task(outcomes_of(engine, requests(60)))
    await asyncio.sleep(1.0)
    server.plan = Plan()
    outcomes = await asyncio.wait_for(work, 30)
    await engine.aclose()
    assert len(outcomes) == 60
    assert all(isinstance(outcome.result, Completion) for outcome in outcomes.values())


@contextmanager
def server_process(*arguments: str) -> Iterator[str]:
    command = [sys.executable, fault_server.__file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(sys.prefix)) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def test_the_server_as_a_process_counts_and_gives_the_same_replies_in_every_process() -> None:
    async def ask(base_url: str) -> list[str]:
        engine = OpenAIEngine(base_url=base_url, model="fake", deadline_s=10)
        outcomes = await outcomes_of(engine, requests(50))
        await engine.aclose()
        results = [outcomes[f"r{n}"].result for n in range(50)]
        return [result.text if isinstance(result, Completion) else type(result).__name__ for result in results]

    replies = []
    for _ in range(2):
        with server_process("--share", "throttle=0.2", "--share", "cut=0.1", "--retry-after", "0.05") as base_url:
            replies.append(asyncio.run(ask(base_url)))
            with urllib.request.urlopen(base_url.removesuffix("/v1") + "/counts") as reply:
                counts = json.load(reply)
        assert counts["faults"]["throttle"] > 0
        assert sum(counts["served"].values()) == 50 - counts["faults"]["cut"]
        assert set(counts["served"].values()) == {1}
    assert replies[0] == replies[1]
    assert replies[0].count("BadOutput") == counts["faults"]["cut"] > 0
