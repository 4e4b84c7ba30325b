"""Rows: stable ids, declared schemas, and the check that a frame has exactly the declared columns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headwater.core.errors import PermanentError

if TYPE_CHECKING:
    import polars as pl

Row = Mapping[str, Any]

MESSAGES = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
"""The conversational column that TRL and chat templates eat."""

REJECT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
        pa.field("raw", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that did not become data, and why. Rejected rows are results, not exceptions."""

    id: str
    """Id of the row that was attempted."""
    reason: str
    """A snake_case code; the report counts rejects by it."""
    detail: str = ""
    """One sentence for a person."""
    raw: str = ""
    """The text as it came, so that nothing paid for is thrown away."""

    def as_row(self) -> dict[str, str]:
        return {"id": self.id, "reason": self.reason, "detail": self.detail, "raw": self.raw}


def row_id(stage: str, parents: Sequence[str], sample: int = 0) -> str:
    """32 hex digits from (stage, parent ids in order, sample index): the same on every machine and in every order."""
    text = "\x1f".join([stage, *parents, str(sample)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def schema(**columns: pa.DataType) -> pa.Schema:
    """A schema whose first column is the non-null `id`, followed by `columns` in the order given."""
    fields = [pa.field("id", pa.string(), nullable=False)]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in columns.items())])


def missing_columns(have: pa.Schema, need: Sequence[str]) -> list[str]:
    """The names in `need` that `have` lacks, in the order of `need`."""
    present = set(have.names)
    return [name for name in need if name not in present]


def conform(frame: pl.DataFrame, to: pa.Schema, where: str) -> pa.Table:
    """The frame as an Arrow table with exactly the schema `to`; columns are matched by name.

    Raises PermanentError when a column is missing, unknown, of a type that does not fit, or null where it must not be:
    that is a fault of the stage `where`, which would otherwise show up as a broken dataset much later.
    """
    have = set(frame.columns)
    want = set(to.names)
    if have != want:
        raise PermanentError(
            f"{where} produced the columns {sorted(have)} but declares {sorted(want)}.",
            todo="Make the stage write every declared column and no other.",
        )
    table = frame.select(to.names).to_arrow()
    try:
        table = table.cast(to)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise PermanentError(
            f"{where} produced values that don't fit its declared schema: {error}.",
            todo="Fix the types in the stage or raise its version with a new schema.",
        ) from error
    for field in to:
        if not field.nullable and table.column(field.name).null_count:
            raise PermanentError(f"{where} wrote a null into {field.name!r}.", todo="Every row needs a value there.")
    return table
