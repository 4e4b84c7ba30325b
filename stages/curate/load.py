"""Load a dataset: records from anywhere become rows with `text` and `messages`; the unusable ones are named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from headwater.core.errors import ConfigError
from headwater.core.rows import MESSAGES, Reject, row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.core.text import clean_text
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.curate.readers import BadRecord, Record
from headwater.stages.curate.sources import Source, open_source

_BATCH_ROWS = 1_000
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_SHOWN_CHARACTERS = 40
_SHOWN_COLUMNS = 30
_RAW_CHARACTERS = 2_000
"""How much of an unusable row is kept in the rejects; the source holds the rest."""


class LoadConfig(StageConfig):
    source: str = Knob(..., min_length=1)
    """A local file (JSONL, CSV, TSV, Parquet, Arrow, text; also compressed), a folder or a pattern (`part-*.jsonl`) of
    them, an fsspec URL, or a Hub id. Its content is fingerprinted, not its name."""
    split: str = "train"
    """Split of a Hub dataset."""
    config: str | None = Field(None, min_length=1)
    """Config (also called subset) of a Hub dataset that has several, such as `main` of `openai/gsm8k`."""
    revision: str | None = None
    """Commit of a Hub dataset; the newest when not given."""
    text: str | None = None
    """Column that holds plain text; it becomes one user message. `text` when neither this nor `messages` is given."""
    messages: str | None = None
    """Column that holds a chat: a list of {role, content}."""
    label: str | None = None
    """Column carried along as the row's label, as text; null stays null."""
    shuffle: bool = False
    """Read rows in a random order that depends on the run's seed and the content only."""
    skip: int = Field(0, ge=0, lt=2**63)
    """Rows to pass over, in that order and before `where`: so two sections can take disjoint parts of one file."""
    where: dict[str, list[str]] = Field(default_factory=dict)
    """Column → allowed values, compared as text; other rows, null among them, are left out (they are not rejects)."""
    limit: int | None = Field(None, ge=1, lt=2**63)
    """Rows to take at most."""
    max_characters: int = Field(20_000, ge=1)
    """A longer text is rejected: it would cost more than all others and be cut anyway."""
    license: str = Knob("not stated")
    """Licence of the data, for the card."""
    max_reject_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows to live with. At 0 the first one is an error that names it."""

    @field_validator("where", mode="before")
    @classmethod
    def _numbers_are_text(cls, where: Any) -> Any:
        """`{class: [2]}` is what one writes for a column of numbers."""
        if not isinstance(where, Mapping):
            return where
        return {
            column: [str(v) if type(v) in (int, float) else v for v in allowed]
            if isinstance(allowed, list)
            else allowed
            for column, allowed in where.items()
        }

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
    version: ClassVar[int] = 2
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
        return open_source(
            self.config.source, split=self.config.split, revision=self.config.revision, config=self.config.config
        )

    def _chosen(self, source: Source, run_seed: int) -> Iterator[tuple[int, Record | BadRecord]]:
        """The records to read, each with its number in the source.

        A row may lack a column that others have, as optional keys of JSONL do. Without the text or the chat it is a
        reject; without the label its label is null; without a column of `where` it has none of the allowed values and
        is left out. A column that none of the first rows has is a wrong name: ConfigError.
        """
        config = self.config
        records: Iterable[tuple[int, Record | BadRecord]] = enumerate(source.records())
        if config.shuffle:
            order = list(records)
            random.Random(derive_seed(run_seed, "shuffle", source.digest)).shuffle(order)
            records = order
        kept = _checked(itertools.islice(records, config.skip, None), dict.fromkeys(config.where, "where"), source)
        matching = ((n, r) for n, r in kept if isinstance(r, BadRecord) or self._matches(r))
        columns = {config.column: "messages" if config.messages else "text"}
        if config.label is not None:
            columns.setdefault(config.label, "label")
        return _checked(itertools.islice(matching, config.limit), columns, source)

    def _matches(self, record: Record) -> bool:
        return all(
            record.get(column) is not None and str(record[column]) in allowed
            for column, allowed in self.config.where.items()
        )

    def _row(self, key: str, number: int, record: Record | BadRecord) -> dict[str, Any] | Reject:
        if isinstance(record, BadRecord):
            return Reject(key, record.reason, record.detail, _beginning(record.raw))
        where = f"row {number} (counted from 0)"
        if self.config.column not in record:
            detail = f"{where}: no column {self.config.column!r}; its columns: {_names(record)}"
            return Reject(key, "missing_column", detail, _beginning(str(record)))
        value = record[self.config.column]
        try:
            chat = _chat(value) if self.config.messages else _single(value)
        except _Unusable as problem:
            return Reject(key, problem.reason, f"{where}: {problem.detail}", _beginning(str(value)))
        cleaned = False
        messages = []
        for role, content in chat:
            text, changed = clean_text(content)
            cleaned |= changed
            messages.append({"role": role, "content": text})
        text = "\n".join(message["content"] for message in messages if message["role"] == "user")
        length = sum(len(message["content"]) for message in messages)
        if length > self.config.max_characters:
            detail = f"{where}: {length:,} characters, more than max_characters = {self.config.max_characters:,}"
            return Reject(key, "too_long", detail, _beginning(text))
        if not text.strip():
            spoken = any(message["role"] == "user" for message in messages)
            reason, detail = ("empty_text", "nothing but white space") if spoken else ("no_user_turn", "no user speaks")
            return Reject(key, reason, f"{where}: {detail}", text)
        label = record.get(self.config.label) if self.config.label is not None else None
        if label is not None:
            label, changed = clean_text(str(label))
            cleaned |= changed
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
            todo=f"Mend the data, or set max_reject_share (now {self.config.max_reject_share:g}) to the share of rows "
            "that may be left out.",
        )


def _beginning(text: str) -> str:
    more = len(text) - _RAW_CHARACTERS
    return text if more <= 0 else f"{text[:_RAW_CHARACTERS]}… ({more:,} characters more)"


def _checked(
    records: Iterable[tuple[int, Record | BadRecord]], columns: Mapping[str, str], source: Source
) -> Iterator[tuple[int, Record | BadRecord]]:
    """The same records. ConfigError when none of the first ones has a column; `columns` maps it to the recipe's key."""
    records = iter(records)
    first = list(itertools.islice(records, _BATCH_ROWS))
    rows = [record for _, record in first if not isinstance(record, BadRecord)]
    for column, key in columns.items():
        if rows and not any(column in row for row in rows):
            where = "the only row that was" if len(rows) == 1 else f"any of the first {len(rows):,} rows that were"
            raise ConfigError(
                f"{source.name!r} has no column {column!r} (the recipe's `{key}`) in {where} read.",
                todo=f"The columns there: {_names(name for row in rows for name in row)}.",
            )
    return itertools.chain(first, records)


def _names(columns: Iterable[Any]) -> str:
    names = [str(name) for name in dict.fromkeys(columns)]
    more = f" and {len(names) - _SHOWN_COLUMNS:,} more" if len(names) > _SHOWN_COLUMNS else ""
    return (", ".join(names[:_SHOWN_COLUMNS]) or "none") + more


class _Unusable(Exception):  # noqa: N818 - a row that is no data, not a fault
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _single(value: Any) -> list[tuple[str, str]]:
    if value is None:
        raise _Unusable("null_text", "the text is null")
    if not isinstance(value, str):
        raise _Unusable("not_a_string", f"the text is {_kind(value)}")
    return [("user", value)]


def _chat(value: Any) -> list[tuple[str, str]]:
    if value is None:
        raise _Unusable("null_messages", "the chat is null")
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else _kind(value)
        raise _Unusable("not_a_chat", f"the chat is {what}, where a list of {{role, content}} belongs")
    return [_turn(n, message) for n, message in enumerate(value)]


def _turn(number: int, message: Any) -> tuple[str, str]:
    where = f"message {number} of the chat"
    if not isinstance(message, Mapping):
        raise _Unusable("not_a_chat", f"{where} is {_kind(message)}, where {{role, content}} belongs")
    given = message.get("role", message.get("from"))
    role = _ROLES.get(str(given))
    if role is None:
        what = "no role" if given is None else f"the role {str(given)[:_SHOWN_CHARACTERS]!r}"
        raise _Unusable("unknown_role", f"{where} has {what}; read are {', '.join(_ROLES)}")
    content = message.get("content", message.get("value"))
    if not isinstance(content, str):
        why = (
            "calls a tool, and tools aren't read" if message.get("tool_calls") else f"has {_kind(content)} for content"
        )
        raise _Unusable("not_a_chat", f"{where} {why}")
    return role, content


def _kind(value: Any) -> str:
    """What JSON calls the value."""
    named = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return named.get(type(value), "an object" if isinstance(value, Mapping) else f"of type {type(value).__name__}")
