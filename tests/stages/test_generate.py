"""One text per prompt, from a real server: what is asked again, what that changes, and what is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from headwater.core.errors import PermanentError
from headwater.core.rows import MESSAGES, schema
from headwater.core.store import StageOutput
from headwater.llm.registry import EngineConfig
from headwater.llm.types import Sampling
from headwater.stages.generate import Generate, GenerateConfig
from headwater.tests.llm.fault_server import Body, FaultServer

Make = Callable[..., StageOutput]


@pytest.fixture
def prompts(make_output: Make) -> StageOutput:
    rows = [{"id": f"p{n}", "prompt": [{"role": "user", "content": f"prompt {n}"}]} for n in range(3)]
    return make_output("prompts", schema(prompt=MESSAGES), rows)


async def _generate(server: FaultServer, run: Make, prompts: StageOutput, **config: Any) -> StageOutput:
    engine = EngineConfig(engine="openai", model="fake", base_url=server.base_url, max_concurrency=1)
    settings = {"sampling": Sampling(max_tokens=40), "max_reject_share": 1.0} | config
    stage = Generate(GenerateConfig(engine=engine, **settings))
    return await asyncio.to_thread(run, stage, {"rows": prompts})


class _Crowd(FaultServer):
    """Answers nothing until `wanted` calls are in flight together, or so many will clearly never come."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted
        self._complete = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.in_flight >= self._wanted:
            self._complete.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), timeout=30)
        return await super()._answer(request)


@pytest.mark.parametrize("most", [3, 90])
async def test_as_many_rows_are_in_work_as_the_engine_takes_calls(run: Make, make_output: Make, most: int) -> None:
    rows = [{"id": f"p{n}", "prompt": [{"role": "user", "content": f"prompt {n}"}]} for n in range(most + 10)]
    prompts = make_output("prompts", schema(prompt=MESSAGES), rows)
    async with _Crowd(most) as server:
        engine = EngineConfig(engine="openai", model="fake", base_url=server.base_url, max_concurrency=most)
        await asyncio.to_thread(run, Generate(GenerateConfig(engine=engine)), {"rows": prompts})

    assert server.peak == most


async def test_a_reply_that_was_cut_is_asked_for_again_with_twice_the_room(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut", "cut", "ok")
        output = await _generate(server, run, prompts, attempts=3)
    first, others = server.bodies[:3], server.bodies[3:]

    assert [body["max_tokens"] for body in first] == [40, 80, 160]
    assert len({body["seed"] for body in first}) == 3
    assert [body["max_tokens"] for body in others] == [40, 40]
    assert output.manifest["counts"] == {"attempted": 3, "accepted": 3, "rejected": 0, "owed": 0}
    assert output.manifest["meter"]["calls"] == 5
    assert set(output.read()["seed"]) == {body["seed"] for body in server.bodies[2:]}


async def test_other_unusable_replies_get_another_seed_and_no_more_room(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("empty_reply", "ok")
        await _generate(server, run, prompts, attempts=2)

    assert [body["max_tokens"] for body in server.bodies] == [40] * 4
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"]


async def test_after_the_last_attempt_the_row_is_rejected_for_its_last_reason(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut", "empty_reply")
        output = await _generate(server, run, prompts, attempts=2)

    assert output.manifest["reasons"] == {"empty_reply": 1}
    assert output.manifest["counts"]["accepted"] == 2


async def test_a_server_that_refuses_more_room_costs_the_row_and_not_the_run(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut", "bad_request")
        output = await _generate(server, run, prompts, attempts=2)

    assert output.manifest["reasons"] == {"cut_at_length": 1}
    assert output.manifest["counts"]["accepted"] == 2


async def test_a_server_that_no_longer_knows_the_key_ends_the_run(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut", "unauthorized")
        with pytest.raises(PermanentError):
            await _generate(server, run, prompts, attempts=2)


async def test_a_server_that_refuses_the_request_itself_ends_the_run(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("empty_reply", "bad_request")
        with pytest.raises(PermanentError):
            await _generate(server, run, prompts, attempts=2)


async def test_too_many_cut_replies_name_the_key_that_gives_them_room(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut", "cut")
        with pytest.raises(PermanentError, match=r"2 of 3 rows.*max_tokens"):
            await _generate(server, run, prompts, max_reject_share=0.5)


async def test_one_attempt_asks_once(run: Make, prompts: StageOutput) -> None:
    async with FaultServer() as server:
        server.script("cut")
        output = await _generate(server, run, prompts)

    assert len(server.bodies) == 3
    assert output.manifest["reasons"] == {"cut_at_length": 1}


async def test_a_reply_of_several_lines_is_refused_where_one_was_asked_for(run: Make, prompts: StageOutput) -> None:
    def reply(body: Body) -> str:
        return "one\ntwo" if "prompt 1" in str(body["messages"]) else " one "

    async with FaultServer(reply=reply) as server:
        output = await _generate(server, run, prompts, single_line=True)

    assert output.manifest["reasons"] == {"several_lines": 1}
    assert set(output.read()["text"]) == {"one"}
