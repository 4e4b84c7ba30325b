"""Rows as chats that know their ids: an engine tells a conversation by its place, a person by its row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.llm.chat import UnfitChatError
from headwater.llm.types import Message

if TYPE_CHECKING:
    import polars as pl

_SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Chats:
    """Conversations in order, each with the id of its row."""

    ids: list[str]
    messages: list[list[Message]]

    @classmethod
    def of(cls, *tables: pl.DataFrame) -> Chats:
        """The rows of tables with the columns `id` and `messages`, one table after the other."""
        return cls(
            [key for table in tables for key in table["id"].to_list()],
            [
                [Message(message["role"], message["content"]) for message in messages]
                for table in tables
                for messages in table["messages"].to_list()
            ],
        )

    def sample(self, rows: int) -> Chats:
        """About `rows` of them, evenly spread."""
        step = max(1, len(self.ids) // rows)
        return Chats(self.ids[::step], self.messages[::step])

    @contextmanager
    def named(self) -> Iterator[None]:
        """While it lasts, an engine that is given `messages` and cannot show one to its model names that one's row."""
        try:
            yield
        except UnfitChatError as error:
            said = " ".join(self.messages[error.index][0].content[:_SHOWN_CHARACTERS].split())
            raise ConfigError(
                f"Row {self.ids[error.index]!r} (it begins with {said!r}){error.why}", todo=error.todo
            ) from error
