"""Load a dataset: records from anywhere become rows with `text` and `messages`; the unusable ones are named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field, model_validator

from headwater.core.errors import ConfigError
from headwater.core.rows import MESSAGES, Reject, row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.core.text import clean_text
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.curate.sources import BadRecord, Record, Source, open_source

_BATCH_ROWS = 1_000
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_RAW_CHARACTERS = 2_000
"""How much of an unusable text is kept in the rejects."""


class LoadConfig(StageConfig):
    source: str = Knob(...)
    """A local file (JSONL, CSV, TSV, Parquet, Arrow, text; also compressed), a folder of them, an fsspec URL, or a Hub
    id. Its content is fingerprinted, not its name."""
    split: str = "train"
    """Split of a Hub dataset."""
    revision: str | None = None
    """Commit of a Hub dataset; the newest when not given."""
    text: str | None = None
    """Column that holds plain text; it becomes one user message. `text` when neither this nor `messages` is given."""
    messages: str | None = None
    """Column that holds a chat: a list of {role, content}."""
    label: str | None = None
    """Column carried along as the row's label, as text."""
    shuffle: bool = False
    """Read rows in a random order that depends on the run's seed and the content only."""
    skip: int = Field(0, ge=0)
    """Rows to pass over, in that order and before `where`: so two sections can take disjoint parts of one file."""
    where: dict[str, list[str]] = Field(default_factory=dict)
    """Column → allowed values, compared as text; other rows are left out (they are not rejects)."""
    limit: int | None = Field(None, ge=1)
    """Rows to take at most."""
    max_characters: int = Field(20_000, ge=1)
    """A longer text is rejected: it would cost more than all others and be cut anyway."""
    license: str = Knob("not stated")
    """Licence of the data, for the card."""
    max_reject_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows to live with. At 0 the first one is an error that names it."""

    @model_validator(mode="after")
    def _one_column(self) -> LoadConfig:
        if self.text is not None and self.messages is not None:
            raise ValueError("give `text` or `messages`, not both")
        return self

    @property
    def column(self) -> str:
        return self.messages or self.text or "text"


class Load(TableStage[LoadConfig]):
    """Rows of a dataset in the form that every later stage reads."""

    name: ClassVar[str] = "load"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def output(self) -> pa.Schema:
        return schema(text=pa.string(), messages=MESSAGES, label=pa.string(), source_row=pa.int64(), cleaned=pa.bool_())

    def external_inputs(self) -> Mapping[str, Any]:
        return {"content": self._source().digest}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=sum(1 for _ in self._chosen(self._source(), run_seed=0)))

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        source = self._source()
        rows: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        for number, record in self._chosen(source, context.run_seed):
            key = row_id(self.name, [source.digest], number)
            made = self._row(key, number, record)
            if isinstance(made, Reject):
                rejects.append(made)
                if self.config.max_reject_share == 0:
                    raise self._unusable(source, rejects, None)
            else:
                rows.append(made)
            if len(rows) == _BATCH_ROWS:
                out.write_rows(rows)
                context.progress(out.rows, self.config.limit)
                rows = []
        out.write_rows(rows)
        out.reject(rejects)
        out.metrics = {"source": source.name}
        total = out.rows + len(rejects)
        if total == 0:
            raise ConfigError(
                f"The dataset {source.name!r} has no rows"
                + (f" with {self.config.where}." if self.config.where else "."),
                todo="Check the file, `where`, `skip` and `limit`.",
            )
        if len(rejects) / total > self.config.max_reject_share:
            raise self._unusable(source, rejects, total)

    def _source(self) -> Source:
        return open_source(self.config.source, split=self.config.split, revision=self.config.revision)

    def _chosen(self, source: Source, run_seed: int) -> Iterator[tuple[int, Record | BadRecord]]:
        config = self.config
        records: Iterable[tuple[int, Record | BadRecord]] = enumerate(source.records())
        if config.shuffle:
            order = list(records)
            random.Random(derive_seed(run_seed, "shuffle", source.digest)).shuffle(order)
            records = order
        kept = itertools.islice(records, config.skip, None)
        matching = ((n, r) for n, r in kept if isinstance(r, BadRecord) or self._matches(r, source))
        return itertools.islice(matching, config.limit)

    def _matches(self, record: Record, source: Source) -> bool:
        for column, allowed in self.config.where.items():
            if column not in record:
                raise _no_column(column, "where", record, source)
            if str(record[column]) not in allowed:
                return False
        if self.config.column not in record:
            raise _no_column(self.config.column, "messages" if self.config.messages else "text", record, source)
        if self.config.label is not None and self.config.label not in record:
            raise _no_column(self.config.label, "label", record, source)
        return True

    def _row(self, key: str, number: int, record: Record | BadRecord) -> dict[str, Any] | Reject:
        if isinstance(record, BadRecord):
            return Reject(key, record.reason, record.detail, record.raw[:_RAW_CHARACTERS])
        value = record[self.config.column]
        chat = _chat(value) if self.config.messages else _single(value)
        where = f"row {number} (counted from 0)"
        if isinstance(chat, str):
            return Reject(key, chat, where, str(value)[:_RAW_CHARACTERS])
        cleaned = False
        messages = []
        for role, content in chat:
            text, changed = clean_text(content)
            cleaned |= changed
            messages.append({"role": role, "content": text})
        text = "\n".join(message["content"] for message in messages if message["role"] == "user")
        length = sum(len(message["content"]) for message in messages)
        if length > self.config.max_characters:
            detail = f"{where} has {length:,} characters, more than max_characters = {self.config.max_characters:,}"
            return Reject(key, "too_long", detail, text[:_RAW_CHARACTERS])
        if not text.strip():
            return Reject(key, "empty_text", where, text)
        label = None if self.config.label is None else str(record[self.config.label])
        return {
            "id": key,
            "text": text,
            "messages": messages,
            "label": label,
            "source_row": number,
            "cleaned": cleaned,
        }

    def _unusable(self, source: Source, rejects: list[Reject], total: int | None) -> ConfigError:
        first = rejects[0]
        share = "" if total is None else f"{len(rejects):,} of {total:,} rows are unusable; the first: "
        return ConfigError(
            f"{source.name!r}: {share}{first.reason} in {first.detail}.",
            todo=f"Mend the data, or raise max_reject_share (now {self.config.max_reject_share:g}) to leave it out.",
        )


def _no_column(column: str, key: str, record: Record, source: Source) -> ConfigError:
    return ConfigError(
        f"{source.name!r} has no column {column!r} (the recipe's `{key}`).",
        todo=f"Its columns: {', '.join(map(str, record))}.",
    )


def _single(value: Any) -> list[tuple[str, str]] | str:
    if value is None:
        return "null_text"
    if not isinstance(value, str):
        return "not_a_string"
    return [("user", value)]


def _chat(value: Any) -> list[tuple[str, str]] | str:
    if value is None:
        return "null_messages"
    if not isinstance(value, list) or not value:
        return "not_a_chat"
    chat = []
    for message in value:
        if not isinstance(message, Mapping):
            return "not_a_chat"
        role = _ROLES.get(str(message.get("role", message.get("from"))))
        content = message.get("content", message.get("value"))
        if role is None or not isinstance(content, str):
            return "not_a_chat"
        chat.append((role, content))
    return chat
