"""The own tokens of a dataset's rows as texts, cut just as the features stage cut them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from headwater.core.store import StageOutput
from headwater.llm.types import Message
from headwater.stages.base import StageContext
from headwater.stages.fac.features import local_engine

if TYPE_CHECKING:
    from headwater.llm.registry import EngineConfig


class Cut(Protocol):
    """The settings of the features stage that decide which tokens are a row's own."""

    @property
    def model(self) -> EngineConfig: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def roles(self) -> tuple[str, ...]: ...


class OwnTokens:
    """Row numbers are those of the features table: rows without own tokens are not in it."""

    def __init__(self, rows: StageOutput, features: StageOutput, cut: Cut, context: StageContext) -> None:
        known = rows.read().select("id", "text", "messages")
        table = features.read().select(id="row").join(known, on="id", how="left", maintain_order="left")
        self._ids = table["id"].to_list()
        self._texts = table["text"].to_list()
        self._messages = table["messages"].to_list()
        self._cut = cut
        self._format = local_engine(context, cut.model).chat_format
        self.of = lru_cache(maxsize=4_096)(self._tokens)
        """The tokens of a row as texts that join to the row's text."""

    def row_id(self, row: int) -> str:
        return str(self._ids[row])

    def text(self, row: int) -> str:
        return str(self._texts[row])

    def _tokens(self, row: int) -> tuple[str, ...]:
        chat = [Message(message["role"], message["content"]) for message in self._messages[row]]
        encoded = self._format.encode([chat], roles=self._cut.roles, max_tokens=self._cut.max_tokens)[0]
        ids = [token for token, own in zip(encoded.token_ids, encoded.own, strict=True) if own]
        return tuple(decode_apart(self._format.tokenizer.decode, ids))


def decode_apart(decode: object, ids: list[int]) -> list[str]:
    """The text that each token adds to the text of those before it.

    A token that ends inside a character adds nothing; the one that completes the character gets all of it.
    """
    assert callable(decode)
    pieces: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        complete = not text.endswith("\ufffd")
        pieces.append(text if complete else "")
        if complete:
            start = end
    return pieces
