"""The HTTP engine against a server that is not ours: `transformers serve` with the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headwater.core.errors import BadOutput
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, Engine, Message, Sampling

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

START_S = 90.0
ASKED = {"What is the capital of France?": 40, "Name three fruits.": 16}
"""Prompts with the most tokens a reply may have: one that ends by itself, one that is cut."""


@pytest.fixture(scope="module")
def base_url(smollm_folder: Path, unused_tcp_port_factory: Callable[[], int]) -> Iterator[str]:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("`transformers serve` needs fastapi, uvicorn and openai")
    port = unused_tcp_port_factory()
    command: list[str | Path] = [
        Path(sys.executable).with_name("transformers"),
        "serve",
        smollm_folder,
        "--port",
        str(port),
    ]
    options = ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    process.kill()
    pytest.fail(f"transformers serve did not start: {process.communicate()[1][-500:]}")


def greedy(text: str, tokens: int) -> ChatRequest:
    return ChatRequest(text, (Message("user", text),), Sampling(temperature=0, max_tokens=tokens), seed=0)


async def results(engine: Engine, requests: list[ChatRequest]) -> dict[str, object]:
    outcomes: list[ChatOutcome] = [outcome async for outcome in engine.chat(requests)]
    return {outcome.request_id: outcome.result for outcome in outcomes}


async def test_greedy_replies_over_http_are_those_of_the_same_model_in_process(
    base_url: str, smollm_folder: Path, engine: TransformersEngine
) -> None:
    requests = [greedy(text, tokens) for text, tokens in ASKED.items()]
    remote = OpenAIEngine(base_url=base_url, model=str(smollm_folder), attempts=1)
    over_http = await results(remote, requests)
    await remote.aclose()
    for request in requests:
        (here,) = (await results(engine, [request])).values()
        assert _text(over_http[request.id]) == _text(here)
    ended = over_http["What is the capital of France?"]
    assert isinstance(ended, Completion)
    assert ended.usage.tokens_in > 0
    assert 0 < ended.usage.tokens_out <= 40


def _text(result: object) -> str:
    assert isinstance(result, Completion | BadOutput)
    return result.text if isinstance(result, Completion) else result.raw


async def test_a_reply_cut_by_a_real_server_is_known_as_cut(base_url: str, smollm_folder: Path) -> None:
    remote = OpenAIEngine(base_url=base_url, model=str(smollm_folder), attempts=1)
    (result,) = (await results(remote, [greedy("Write a long story about a dragon.", 5)])).values()
    await remote.aclose()
    assert isinstance(result, BadOutput)
    assert result.reason == "cut_at_length"
    assert result.raw
