"""The engine that runs a transformers model inside this process, on CPU or GPU: chats, scores and activations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from headwater.core.errors import ConfigError
from headwater.llm.hidden import HiddenBatch, stream_hidden
from headwater.llm.local import LocalModel
from headwater.llm.types import ChatOutcome, ChatRequest, Message, TokenScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Item = TypeVar("_Item")

__all__ = ["HiddenBatch", "TransformersEngine"]

_BATCH_TOKENS_CPU = 1024
"""Tokens in one forward pass: on a CPU more only adds padding."""
_BATCH_TOKENS_ACCELERATOR = 16384
_MAX_BATCH_ROWS = 128
_MAX_CACHE_TOKENS = 1 << 15
"""Tokens whose keys and values may be held at once: fewer rows are decoded together when they are long."""


class TransformersEngine(LocalModel):
    """A model folder or Hub id, loaded at first use; see `LocalModel` for what it raises."""

    batched = True

    def __init__(
        self,
        *,
        model: str | Path,
        name: str | None = None,
        engine: str = "transformers",
        dtype: str = "float32",
        device: str = "auto",
        max_batch_tokens: int | None = None,
        max_batch_rows: int = _MAX_BATCH_ROWS,
        threads: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache: Path | None = None,
    ) -> None:
        super().__init__(
            model=model,
            engine=engine,
            dtype=dtype,
            name=name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            cache=cache,
        )
        self._device = device
        self._asked_batch_tokens = max_batch_tokens
        self._threads = threads
        self._max_batch_rows = max_batch_rows
        self._busy = threading.Lock()
        # One thread for all decoding: torch starts a pool of its own for every thread that calls it.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwater-decode")

    @property
    def _max_batch_tokens(self) -> int:
        on_cpu = _device(self._device).type == "cpu"
        return self._asked_batch_tokens or (_BATCH_TOKENS_CPU if on_cpu else _BATCH_TOKENS_ACCELERATOR)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with its language-model head, in eval mode."""
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        from headwater.llm.allocator import return_large_blocks
        from headwater.llm.kv import use_grouped_attention

        return_large_blocks()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with _no_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(
                    self.folder,
                    dtype=getattr(torch, self._dtype),
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=self._trust,
                )
        except (OSError, ValueError, SafetensorError) as error:
            raise self._unloadable("model", error) from error
        model = model.to(_device(self._device)).eval()
        use_grouped_attention(model)
        return model

    def hidden_states(
        self,
        conversations: Sequence[Sequence[Message]],
        layer: int,
        *,
        max_tokens: int = 512,
        roles: Sequence[str] = ("user",),
    ) -> Iterator[HiddenBatch]:
        """Activations of the residual stream after block `layer` (0-based), for the own tokens of every conversation.

        The same numbers as `hidden_states[layer + 1]` of transformers, for the last block before the final norm. A
        conversation's own tokens are those of its messages in `roles`, at most `max_tokens` of them. Tokens that all
        conversations begin with (a system prompt) are computed once and not returned. Every conversation occurs once.
        """
        with self._busy:
            model, chat_format = self.model, self.chat_format
        yield from self._one_at_a_time(
            stream_hidden(
                model,
                chat_format,
                conversations,
                layer,
                roles=roles,
                max_tokens=max_tokens,
                max_batch_tokens=self._max_batch_tokens,
            )
        )

    def score(self, texts: Sequence[str]) -> Iterator[TokenScores]:
        """Natural-log probabilities of the tokens of raw texts, in order; see `ScoringEngine.score`."""
        from headwater.llm.score import score_texts

        with self._busy:
            model, tokenizer = self.model, self.tokenizer
        yield from self._one_at_a_time(score_texts(model, tokenizer, texts, max_batch_tokens=self._max_batch_tokens))

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        """Answer all requests together, streaming outcomes as rows end; see `Engine.chat`.

        A row draws from its own seed, so its reply depends on its batch mates only through the round-off of floats. The
        batches follow from the requests alone: the same call gives the same replies.
        """
        stop = threading.Event()
        batch = list(requests)
        loop = asyncio.get_running_loop()
        groups = await loop.run_in_executor(self._worker, self._generate, batch, stop.is_set)
        try:
            while (group := await loop.run_in_executor(self._worker, next, groups, None)) is not None:
                for outcome in group:
                    yield outcome
        finally:
            stop.set()

    async def aclose(self) -> None:
        """Let go of the model."""
        self._worker.shutdown(wait=True)
        self.__dict__.pop("model", None)

    def _one_at_a_time(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Each step under the lock, so that threads take turns with the model."""
        while True:
            with self._busy:
                item = next(items, None)
            if item is None:
                return
            yield item

    def _generate(self, requests: list[ChatRequest], stopped: Callable[[], bool]) -> Iterator[list[ChatOutcome]]:
        from headwater.llm.generate import Generator

        with self._busy:
            generator = Generator(
                self.model,
                self.chat_format,
                max_rows=self._max_batch_rows,
                max_cache_tokens=_MAX_CACHE_TOKENS,
                max_batch_tokens=self._max_batch_tokens,
                stopped=stopped,
            )
        return self._one_at_a_time(generator.run(requests))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading is quick, and the run shows bars of its own."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"There is no device {name!r}.", todo="Use auto, cpu, cuda or cuda:N.") from error
