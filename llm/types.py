"""What goes into an engine and what comes out: requests, completions, scores, activations, identities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import Field

from headwater.core.errors import HeadwaterError
from headwater.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(Settings):
    """How to draw a completion. Part of the stage's config, hence of its fingerprint."""

    temperature: float = Field(0.8, ge=0)
    """0 decodes greedily."""
    top_p: float = Field(0.9, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)
    """A reply that reaches this many tokens without ending is cut, hence never data."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply; the text itself is not part of the reply."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    id: str
    """Names the request in journals, rejects and errors; unique within one call of `chat`."""
    messages: tuple[Message, ...]
    """Ends with a user message, or with an assistant message that the model continues (a prefill)."""
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    tokens_in: int = 0
    tokens_cached: int = 0
    """Those of `tokens_in` that the server served from its prefix cache."""
    tokens_out: int = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """In, cached, out: as a `BadOutput` carries them."""
        return self.tokens_in, self.tokens_cached, self.tokens_out


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    """The new text only: a prefill is not repeated. Cleaned: no lone surrogate, no NUL."""
    usage: Usage = field(default_factory=Usage)
    cleaned: bool = False
    """Whether unstorable characters had to be replaced."""


@dataclass(frozen=True, slots=True)
class ChatOutcome:
    """What became of one request: a completion, or the typed error that stands in its place."""

    request_id: str
    result: Completion | HeadwaterError


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Natural-log probabilities of a text's own tokens under the model."""

    token_ids: NDArray[np.int64]
    """Shape (tokens,)."""
    logprobs: NDArray[np.float32]
    """Shape (tokens,), in nats; the first token of a text has no context and is NaN."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What makes two engines interchangeable: part of every fingerprint that used the engine."""

    engine: str
    """`transformers`, `vllm`, `openai`, `embedded`."""
    model: str
    """A name that means the same on another machine: never an absolute path."""
    revision: str
    """A commit, or the sha256 of the weights; for a server, what it reports."""
    tokenizer: str
    """sha256 of the tokenizer files; empty when it is out of sight behind a server."""
    chat_template: str
    """sha256 of the chat template; empty when out of sight."""
    dtype: str = ""


@runtime_checkable
class Engine(Protocol):
    """A language model that answers chats. `score` and `hidden_states` belong to the engines that can."""

    @property
    def identity(self) -> EngineIdentity: ...

    @property
    def batched(self) -> bool:
        """True for an engine inside this process, which answers many requests at once and nothing in between.

        Its results may depend on the batch composition in the last float digit, so the runner hands it the same
        batches again after a crash.
        """
        ...

    def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        """Stream one outcome per request, in any order. Never raises for a single request's failure."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    def score(self, texts: Sequence[str]) -> Iterator[TokenScores]:
        """Per-token log-probabilities of raw texts (no chat template, no added special tokens), in order."""
        ...
