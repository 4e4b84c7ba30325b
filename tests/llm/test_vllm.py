"""The vLLM engine, for real, on the CPU or a GPU.

vLLM has an environment of its own: `.ci/vllm-env.sh && .venv-vllm/bin/python -m pytest tests/llm/test_vllm.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec

import numpy as np
import pytest
import pytest_asyncio

from headwater.core.errors import BadOutput, ConfigError
from headwater.llm.transformers import TransformersEngine
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, Message, Sampling
from headwater.llm.vllm import VllmEngine

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: see .ci/vllm-env.sh"),
    pytest.mark.asyncio(loop_scope="session"),
]
SHORT = Sampling(temperature=0.8, max_tokens=60)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(smollm_folder: str) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(model=smollm_folder, name="smollm2-135m", dtype="float32", max_model_len=512)
    yield engine
    await engine.aclose()


async def replies(engine: VllmEngine, requests: list[ChatRequest]) -> dict[str, ChatOutcome]:
    outcomes = [outcome async for outcome in engine.chat(requests)]
    assert sorted(o.request_id for o in outcomes) == sorted(r.id for r in requests)
    return {o.request_id: o for o in outcomes}


def ask(name: str, text: str, sampling: Sampling = SHORT, seed: int = 0, prefill: str = "") -> ChatRequest:
    messages = [Message("user", text)] + ([Message("assistant", prefill)] if prefill else [])
    return ChatRequest(name, tuple(messages), sampling, seed)


def raw(outcome: ChatOutcome) -> str:
    assert isinstance(outcome.result, Completion | BadOutput)
    return outcome.result.text if isinstance(outcome.result, Completion) else outcome.result.raw


async def test_a_seed_repeats_its_reply_in_another_batch(vllm: VllmEngine) -> None:
    requests = [ask(f"{i}", f"Write one short sentence about the number {i}.", seed=i) for i in range(12)]
    first = await replies(vllm, requests)
    second = await replies(vllm, requests[::-1])
    assert {k: raw(v) for k, v in first.items()} == {k: raw(v) for k, v in second.items()}
    assert sum(isinstance(o.result, Completion) for o in first.values()) >= 6


async def test_seeds_vary_the_reply(vllm: VllmEngine) -> None:
    got = await replies(vllm, [ask(f"{i}", "Name an animal and a place.", seed=i) for i in range(8)])
    assert len({raw(o) for o in got.values()}) > 3


async def test_greedy_replies_equal_those_of_the_transformers_engine(
    vllm: VllmEngine, engine: TransformersEngine
) -> None:
    greedy = Sampling(temperature=0, max_tokens=20)
    requests = [ask(q, q, greedy) for q in ("What is the capital of France?", "Name a colour.", "Count from 1 to 9.")]
    mine = await replies(vllm, requests)
    theirs = {o.request_id: o async for o in engine.chat(requests)}
    assert {k: raw(o) for k, o in mine.items()} == {k: raw(o) for k, o in theirs.items()}


async def test_a_prefill_is_continued_and_not_repeated(vllm: VllmEngine) -> None:
    request = ask("p", "What is the capital of France?", Sampling(temperature=0), prefill="The capital of France is")
    assert raw((await replies(vllm, [request]))["p"]).startswith(" Paris")


async def test_a_reply_that_reaches_the_limit_is_not_data(vllm: VllmEngine) -> None:
    request = ask("cut", "Tell me a very long story.", Sampling(temperature=0, max_tokens=5))
    result = (await replies(vllm, [request]))["cut"].result
    assert isinstance(result, BadOutput)
    assert result.reason == "cut_at_length"
    assert result.raw


async def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(vllm: VllmEngine) -> None:
    request = ask("stop", "What is the capital of France?", Sampling(temperature=0, stop=("Paris",)))
    result = (await replies(vllm, [request]))["stop"].result
    assert isinstance(result, Completion)
    assert result.text
    assert "Paris" not in result.text


async def test_a_prompt_beyond_the_context_is_refused_alone(vllm: VllmEngine) -> None:
    got = await replies(vllm, [ask("long", "word " * 600), ask("short", "Say hello.", Sampling(temperature=0))])
    assert isinstance(got["long"].result, BadOutput)
    assert got["long"].result.reason == "prompt_too_long"
    assert raw(got["short"])


async def test_a_caller_that_leaves_early_leaves_nothing_running(vllm: VllmEngine) -> None:
    stream = vllm.chat([ask(f"{i}", "Hi!", Sampling(temperature=0, max_tokens=n)) for i, n in enumerate((1, 400))])
    await anext(stream)
    await stream.aclose()
    assert not vllm.llm.llm_engine.has_unfinished_requests()


async def test_scores_agree_with_the_transformers_engine(vllm: VllmEngine, engine: TransformersEngine) -> None:
    texts = ["The capital of France is Paris.", "", "a", "Rain falls on the sea, again and again and again."]
    for mine, theirs in zip(vllm.score(texts), engine.score(texts), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-2)


async def test_a_text_beyond_the_context_is_named(vllm: VllmEngine) -> None:
    with pytest.raises(ConfigError, match="Text 1 has"):
        list(vllm.score(["short", "word " * 600]))


async def test_identity_differs_from_transformers_by_the_engine_alone(
    vllm: VllmEngine, engine: TransformersEngine
) -> None:
    assert vllm.identity.engine == "vllm"
    assert vllm.identity.revision == engine.identity.revision
    assert vllm.identity.tokenizer == engine.identity.tokenizer
