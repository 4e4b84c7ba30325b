"""The HTTP engine against a real server, one fault at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from headwater.core.errors import (
    BadOutput,
    ConfigError,
    HeadwaterError,
    PermanentError,
    ThrottledError,
    TransientError,
)
from headwater.llm.http_gate import Gate
from headwater.llm.http_models import portable_name
from headwater.llm.http_tries import FIRST_BACKOFF_S, LAST_BACKOFF_S, Tries
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Completion, Engine, Message, Sampling, Usage
from headwater.tests.llm.fault_server import FaultServer, Plan, reply_to

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY = "sk-very-secret-0123456789"


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    async with FaultServer() as running:
        yield running


@pytest.fixture
async def engine(server: FaultServer) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine(base_url=server.base_url, model="fake", deadline_s=10, attempts=2)
    yield made
    await made.aclose()


@pytest.fixture(params=["lean", "aiohttp"])
async def each_way(
    request: pytest.FixtureRequest, engine: OpenAIEngine, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> OpenAIEngine:
    """The engine over either transport. Where aiohttp is wanted, the server serves as its own proxy."""
    if request.param == "aiohttp":
        _use_as_proxy(server, monkeypatch)
    return engine


def _use_as_proxy(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")


def request(number: int = 1, *messages: Message, sampling: Sampling | None = None) -> ChatRequest:
    said = messages or (Message("user", f"row {number}"),)
    return ChatRequest(f"r{number}", said, sampling or Sampling(), seed=number)


async def failure(engine: OpenAIEngine, number: int = 1) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        await engine.complete(request(number))
    return caught.value


def test_it_is_an_engine_that_answers_from_elsewhere() -> None:
    engine = OpenAIEngine(base_url="http://localhost:8000/v1", model="m")
    assert isinstance(engine, Engine)
    assert engine.batched is False


async def test_every_request_sends_its_own_seed_and_sampling(server: FaultServer, each_way: OpenAIEngine) -> None:
    sampling = Sampling(temperature=0.3, top_p=0.7, max_tokens=9, stop=("\n\n", "END"))
    largest_seed = 2**63 - 1
    messages = (Message("system", "be brief"), Message("user", "hi"))
    completion = await each_way.complete(ChatRequest("a", messages, sampling, largest_seed))
    assert server.bodies == [
        {
            "model": "fake",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "temperature": 0.3,
            "top_p": 0.7,
            "max_tokens": 9,
            "seed": largest_seed,
            "stop": ["\n\n", "END"],
        }
    ]
    assert completion == Completion(reply_to(server.bodies[0]), Usage(tokens_in=3, tokens_cached=1, tokens_out=2))


async def test_a_prefill_asks_the_server_to_continue_the_last_message(
    server: FaultServer, engine: OpenAIEngine
) -> None:
    await engine.complete(request(1, Message("user", "list"), Message("assistant", "1. ")))
    (body,) = server.bodies
    assert body["messages"][-1] == {"role": "assistant", "content": "1. "}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False


async def test_a_server_that_cannot_continue_a_message_is_named_as_the_reason(
    server: FaultServer, engine: OpenAIEngine
) -> None:
    server.script("bad_request")
    with pytest.raises(PermanentError, match="continue_final_message"):
        await engine.complete(request(1, Message("user", "list"), Message("assistant", "1. ")))


async def test_a_prompt_with_a_lone_surrogate_can_be_sent(server: FaultServer, engine: OpenAIEngine) -> None:
    await engine.complete(request(1, Message("user", "odd \ud83d text\x00")))
    assert server.bodies[0]["messages"][0]["content"] == "odd \ufffd text"


async def test_extra_body_is_sent_and_null_leaves_a_field_out(server: FaultServer) -> None:
    engine = OpenAIEngine(base_url=server.base_url, model="fake", extra_body={"top_k": 20, "temperature": None})
    await engine.complete(request())
    await engine.aclose()
    assert server.bodies[0]["top_k"] == 20
    assert "temperature" not in server.bodies[0]


async def test_chat_streams_one_outcome_per_request(server: FaultServer, engine: OpenAIEngine) -> None:
    server.script("ok", "cut", "bad_request")
    outcomes = [outcome async for outcome in engine.chat(request(number) for number in range(20))]
    assert sorted(outcome.request_id for outcome in outcomes) == sorted(f"r{number}" for number in range(20))
    kinds = [type(outcome.result) for outcome in outcomes]
    assert kinds.count(Completion) == 18
    assert kinds.count(BadOutput) == 1
    assert sum(isinstance(outcome.result, PermanentError) for outcome in outcomes) == 1


async def test_chat_with_nothing_yields_nothing(engine: OpenAIEngine) -> None:
    assert [outcome async for outcome in engine.chat([])] == []


async def test_chat_yields_an_outcome_before_the_slowest_is_done(server: FaultServer, engine: OpenAIEngine) -> None:
    server.script("hang")
    outcomes = engine.chat([request(1), request(2)])
    first = await asyncio.wait_for(anext(outcomes), 5)
    assert isinstance(first.result, Completion)
    await outcomes.aclose()


async def test_chat_reads_requests_no_faster_than_calls_go_out(server: FaultServer) -> None:
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=4)
    read = 0

    def endless() -> Iterator[ChatRequest]:
        nonlocal read
        while True:
            read += 1
            yield request(read)

    outcomes = engine.chat(endless())
    for _ in range(10):
        await anext(outcomes)
    assert read <= 10 + 4 + 2
    await outcomes.aclose()
    await engine.aclose()


async def test_the_gate_holds_over_many_coroutines_that_chat_one_request_each(server: FaultServer) -> None:
    server.plan = Plan(latency_s=0.02)
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=5)

    async def one(number: int) -> list[str]:
        return [outcome.request_id async for outcome in engine.chat([request(number)])]

    ids = await asyncio.gather(*(one(number) for number in range(40)))
    await engine.aclose()
    assert ids == [[f"r{number}"] for number in range(40)]
    assert server.peak == 5


async def test_a_cancelled_call_gives_its_place_back(server: FaultServer) -> None:
    server.script("hang")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=1)
    call = asyncio.create_task(engine.complete(request(1)))
    await asyncio.sleep(0.05)
    call.cancel()
    assert (await asyncio.wait_for(engine.complete(request(2)), 5)).text.startswith("reply")
    await engine.aclose()


@pytest.mark.parametrize(
    "fault", ["http_500", "garbage", "half_body", "empty_body", "error_in_200", "close", "overloaded"]
)
async def test_a_fault_that_passes_is_tried_again(server: FaultServer, each_way: OpenAIEngine, fault: str) -> None:
    server.script(fault)
    completion = await each_way.complete(request())
    assert completion.text == reply_to(server.bodies[0])
    assert list(server.asked.values()) == [2]
    assert list(server.served.values()) == [1]


@pytest.mark.parametrize("fault", ["garbage", "half_body", "empty_body", "error_in_200"])
async def test_a_reply_that_stays_unreadable_is_bad_output(
    server: FaultServer, each_way: OpenAIEngine, fault: str
) -> None:
    server.plan = Plan(always=fault)
    error = await failure(each_way)
    assert isinstance(error, BadOutput)
    assert error.reason == "error_reply"
    assert "'r1' failed 2 times" in str(error)
    assert server.faults[fault] == 2


async def test_a_server_fault_that_stays_is_transient_and_names_the_request(
    server: FaultServer, each_way: OpenAIEngine
) -> None:
    server.plan = Plan(always="http_500")
    error = await failure(each_way)
    assert type(error) is TransientError
    assert "answered 500" in str(error)
    assert "'r1' failed 2 times" in str(error)
    assert "run again" in error.todo


@pytest.mark.parametrize("fault", ["hang", "trickle"])
@pytest.mark.parametrize("way", ["lean", "aiohttp"])
async def test_a_deadline_ends_every_call_even_one_that_keeps_sending(
    server: FaultServer, fault: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "aiohttp":
        _use_as_proxy(server, monkeypatch)
    server.plan = Plan(always=fault)
    engine = OpenAIEngine(base_url=server.base_url, model="fake", deadline_s=0.3, attempts=1)
    began = asyncio.get_running_loop().time()
    error = await failure(engine)
    await engine.aclose()
    assert type(error) is TransientError
    assert "within 0.3 s" in str(error)
    assert asyncio.get_running_loop().time() - began < 1.5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("cut", "cut_at_length"), ("content_filter", "content_filter"), ("empty_reply", "empty_reply"),
     ("too_long", "context_length")],
)  # fmt: skip
async def test_bad_output_is_not_tried_again(
    server: FaultServer, each_way: OpenAIEngine, fault: str, reason: str
) -> None:
    server.plan = Plan(always=fault)
    error = await failure(each_way)
    assert isinstance(error, BadOutput)
    assert error.reason == reason
    assert server.faults[fault] == 1


@pytest.mark.parametrize(
    ("fault", "named"),
    [("bad_request", "400, invalid_value"), ("unauthorized", "401, invalid_api_key"),
     ("no_quota", "429, insufficient_quota"), ("redirect", "307")],
)  # fmt: skip
async def test_a_refusal_is_permanent_and_not_tried_again(
    server: FaultServer, each_way: OpenAIEngine, fault: str, named: str
) -> None:
    server.plan = Plan(always=fault)
    error = await failure(each_way)
    assert isinstance(error, PermanentError)
    assert named in str(error)
    assert server.faults[fault] == 1


async def test_surrogates_are_cleaned_and_flagged(server: FaultServer, engine: OpenAIEngine) -> None:
    server.script("surrogates")
    completion = await engine.complete(request())
    assert completion.text == "broken \ufffd half, whole \N{GRINNING FACE}, nul ."
    assert completion.cleaned


async def test_a_reply_without_usage_counts_zero_tokens(server: FaultServer, engine: OpenAIEngine) -> None:
    server.script("no_usage")
    assert (await engine.complete(request())).usage == Usage()


@pytest.mark.parametrize("fault", ["throttle", "throttle_in_200"])
async def test_throttling_uses_up_no_attempts(server: FaultServer, engine: OpenAIEngine, fault: str) -> None:
    server.plan = Plan(retry_after="0.05")
    server.script(*[fault] * 3)
    assert (await engine.complete(request())).text == reply_to(server.bodies[0])
    assert list(server.asked.values()) == [4]


async def test_retry_after_is_honoured_by_everybody(server: FaultServer) -> None:
    server.plan = Plan(latency_s=0.05, retry_after="0.6")
    server.script("throttle")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", max_concurrency=4)
    outcomes = [outcome async for outcome in engine.chat(request(number) for number in range(12))]
    await engine.aclose()
    assert all(isinstance(outcome.result, Completion) for outcome in outcomes)
    first, *others = sorted(server.arrivals)
    early = [at - first for at in others if at - first < 0.6]
    assert len(early) == 3, "the three calls that were on their way, and nobody else"
    assert max(early) < 0.05


async def test_a_call_throttled_without_end_is_given_up_with_advice(server: FaultServer) -> None:
    server.plan = Plan(always="throttle", retry_after="0.1")
    engine = OpenAIEngine(base_url=server.base_url, model="fake", deadline_s=0.5, patience_s=0.5)
    error = await asyncio.wait_for(failure(engine), 5)
    await engine.aclose()
    assert isinstance(error, ThrottledError)
    assert "everything finished is kept" in error.todo


async def test_the_other_name_of_the_length_limit_is_learnt_once_by_all(
    server: FaultServer, engine: OpenAIEngine
) -> None:
    server.plan = Plan(always="new_limit_only", latency_s=0.02)
    for start in (0, 8):
        outcomes = [outcome async for outcome in engine.chat(request(start + number) for number in range(8))]
        assert all(isinstance(outcome.result, Completion) for outcome in outcomes)
    assert [("max_tokens" in body) for body in server.bodies] == [True] * 8 + [False] * 16
    assert server.bodies[-1]["max_completion_tokens"] == Sampling().max_tokens


async def test_a_server_that_is_not_there_is_transient_after_patience(unused_tcp_port: int) -> None:
    engine = OpenAIEngine(
        base_url=f"http://127.0.0.1:{unused_tcp_port}", model="m", deadline_s=0.8, patience_s=0.8, attempts=1
    )
    error = await asyncio.wait_for(failure(engine), 10)
    await engine.aclose()
    assert type(error) is TransientError
    assert f"127.0.0.1:{unused_tcp_port} has answered nothing for" in str(error)
    assert "Run again" in error.todo


async def test_a_request_that_breaks_the_connection_while_others_are_answered_uses_up_its_attempts(
    server: FaultServer,
) -> None:
    poison = "row 999"
    engine = OpenAIEngine(base_url=server.base_url, model="fake", attempts=2, deadline_s=5)
    server.close_on = poison

    async def keep_busy() -> None:
        for number in range(200):
            await engine.complete(request(number))
            await asyncio.sleep(0.01)

    busy = asyncio.create_task(keep_busy())
    error = await asyncio.wait_for(failure(engine, 999), 10)
    busy.cancel()
    await engine.aclose()
    assert type(error) is TransientError
    assert "'r999' failed 2 times" in str(error)


def test_pauses_grow_are_jittered_by_the_seed_and_repeat_exactly() -> None:
    async def pauses(number: int) -> list[float]:
        gate = Gate("server:1", most=1, patience_s=60)
        tries = Tries(request(number), attempts=10, patience_s=60)
        return [tries.pause_after(TransientError("x"), gate) for _ in range(8)]

    one, again, other = (asyncio.run(pauses(number)) for number in (1, 1, 2))
    assert one == again
    assert one != other
    for number, pause in enumerate(one):
        full = min(FIRST_BACKOFF_S * 2**number, LAST_BACKOFF_S)
        assert full / 2 <= pause <= full


def test_one_engine_serves_one_event_loop_after_the_other(unused_tcp_port: int) -> None:
    engine = OpenAIEngine(base_url=f"http://127.0.0.1:{unused_tcp_port}", model="fake")

    async def once(number: int) -> str:
        async with FaultServer(port=unused_tcp_port):
            completion = await engine.complete(request(number))
            if number == 1:
                await engine.aclose()
            return completion.text

    assert len({asyncio.run(once(number)) for number in (1, 2, 3)}) == 3


async def test_a_proxy_of_the_environment_is_used(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_as_proxy(server, monkeypatch)
    engine = OpenAIEngine(base_url="http://model.invalid/v1", model="fake")
    await engine.complete(request())
    await engine.aclose()
    assert server.headers[0]["Host"] == "model.invalid"


async def test_the_key_is_sent_and_shown_nowhere(server: FaultServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = OpenAIEngine(base_url=server.base_url, model="fake", api_key=KEY, attempts=1, deadline_s=5)
    faults = ["unauthorized", "garbage", "half_body", "http_500", "cut"]
    server.script(*faults)
    errors = [await failure(engine, number) for number in range(len(faults))]
    server.script("throttle", "ok")
    server.plan = Plan(retry_after="0.05")
    await engine.complete(request())
    identity = await asyncio.to_thread(lambda: engine.identity)
    await engine.aclose()
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    shown = [*map(_everything, errors), caplog.text, repr(engine), str(vars(engine)), repr(identity)]
    assert not any(KEY in text for text in shown)
    assert "***" in str(errors[0])


def _everything(error: BaseException) -> str:
    parts = [repr(error), str(error), str(vars(error))]
    for inner in (error.__cause__, error.__context__):
        parts += [_everything(inner)] if inner is not None else []
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "ftp://host/v1"}, "base_url"),
        ({"base_url": ""}, "base_url"),
        ({"base_url": "http://me:secret@host/v1"}, "password"),
        ({"base_url": "http://host/v1?code=secret"}, "'code' of its query"),
        ({"base_url": "http://host:port/v1"}, "base_url"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"attempts": 0}, "attempts"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"patience_s": -1}, "patience_s"),
        ({"api_key": "one\ntwo"}, "api_key"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"logit_bias": {1: {2, 3}}}}, "extra_body"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: Mapping[str, Any], named: str) -> None:
    settings = {"base_url": "http://localhost:8000/v1", "model": "m", **wrong}
    with pytest.raises(ConfigError, match=named) as caught:
        OpenAIEngine(**settings)
    assert caught.value.todo
    assert "one\ntwo" not in str(caught.value)


@pytest.mark.parametrize(
    "given", ["", "/", "/v1", "/v1/", "/v1/chat/completions"], ids=["none", "slash", "v1", "v1slash", "whole"]
)
async def test_base_url_is_understood_as_people_write_it(server: FaultServer, given: str) -> None:
    engine = OpenAIEngine(base_url=f"http://127.0.0.1:{server.port}{given}", model="fake")
    await engine.complete(request())
    await engine.aclose()
    assert server.asked.total() == 1


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions"])
async def test_the_query_of_base_url_goes_along_with_every_request(server: FaultServer, path: str) -> None:
    query = "api-version=2024-06-01&x=1%2B2"
    engine = OpenAIEngine(base_url=f"http://127.0.0.1:{server.port}{path}?{query}", model="fake")
    await engine.complete(request())
    await asyncio.to_thread(lambda: engine.identity)
    await engine.aclose()
    assert server.queries == [query, query]


async def identity_with(server: FaultServer, card: dict[str, Any], **settings: Any) -> tuple[str, str]:
    server.card = card
    engine = OpenAIEngine(base_url=server.base_url, **{"model": card.get("id", "fake"), **settings})
    identity = await asyncio.to_thread(lambda: engine.identity)
    assert identity.engine == "openai"
    return identity.model, identity.revision


async def test_names_owners_and_start_times_are_no_revision(server: FaultServer) -> None:
    card = {"id": "org/name", "object": "model", "created": 1, "owned_by": "vllm", "root": "org/name"}
    assert await identity_with(server, card) == ("org/name", "")


async def test_a_revision_the_server_reports_is_part_of_the_identity(server: FaultServer) -> None:
    assert await identity_with(server, {"id": "org/name", "revision": COMMIT}) == ("org/name", COMMIT)


async def test_the_commit_in_a_snapshot_path_is_the_revision(server: FaultServer) -> None:
    root = f"/home/me/.cache/huggingface/hub/models--org--na-me/snapshots/{COMMIT}"
    assert await identity_with(server, {"id": "short", "root": root}) == ("short", COMMIT)
    assert await identity_with(server, {"id": root, "root": root}) == ("org/na-me", COMMIT)


async def test_the_identity_is_the_same_wherever_the_server_stands() -> None:
    seen = set()
    for _ in range(2):
        async with FaultServer() as server:
            seen.add(await identity_with(server, {"id": "org/name"}))
    assert len(seen) == 1


async def test_a_server_that_is_switched_off_counts_as_one_that_reports_nothing(unused_tcp_port: int) -> None:
    engine = OpenAIEngine(base_url=f"http://127.0.0.1:{unused_tcp_port}", model="org/name")
    assert (await asyncio.to_thread(lambda: engine.identity)).revision == ""


async def test_extra_body_changes_the_identity_and_its_key_order_does_not(server: FaultServer) -> None:
    card = {"id": "m"}
    plain = await identity_with(server, card)
    one = await identity_with(server, card, extra_body={"a": 1, "b": 2})
    same = await identity_with(server, card, extra_body={"b": 2, "a": 1})
    other = await identity_with(server, card, extra_body={"a": 1, "b": 3})
    assert one == same
    assert len({plain, one, other}) == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/name", "org/name"), ("/data/models/mine", "mine"), (r"C:\models\mine", "mine"), ("gpt-4o", "gpt-4o")],
)
def test_an_absolute_path_never_becomes_a_name(model: str, name: str) -> None:
    assert portable_name(model) == name


def test_importing_the_engine_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, headwater.llm.openai; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
