"""Rows: stable ids, declared schemas, and the check that a frame has exactly the declared columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headwater.core.errors import PermanentError
from headwater.core.fingerprint import canonical_json, sha256_text
from headwater.core.text import clean_text

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
        """As in REJECT_SCHEMA, its text storable."""
        return {
            "id": self.id,
            "reason": self.reason,
            "detail": clean_text(self.detail)[0],
            "raw": clean_text(self.raw)[0],
        }


def warm_up() -> None:
    """What pyarrow does at its first conversion of Python values: it imports pandas, which takes a quarter of a second.

    Call it in a thread while something else is awaited.
    """
    pa.array([""])


def row_id(stage: str, parents: Sequence[str], sample: int = 0) -> str:
    """32 hex digits from (stage, parent ids in order, sample index): the same on every machine and in every order."""
    return sha256_text(canonical_json([stage, list(parents), sample]))[:32]


def schema(**columns: pa.DataType) -> pa.Schema:
    """A schema whose first column is the non-null `id`, followed by `columns` in the order given."""
    fields = [pa.field("id", pa.string(), nullable=False)]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in columns.items())])


def conform(frame: pl.DataFrame, to: pa.Schema, where: str) -> pa.Table:
    """The frame as an Arrow table with exactly the schema `to`; columns are matched by name.

    Raises PermanentError when a column is missing, unknown, of a type that does not fit, or null where it must not be:
    that is a fault of the stage `where`, which would otherwise show up as a broken dataset much later.
    """
    _same_columns(set(frame.columns), set(to.names), where)
    table = frame.select(to.names).to_arrow()
    for field in to:
        have = table.schema.field(field.name).type
        if not _fits(have, field.type):
            raise _misfit(where, f"column {field.name!r} is {have}, declared {field.type}")
    try:
        table = table.cast(to)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise _misfit(where, str(error)) from error
    return _without_forbidden_nulls(table, where)


def table_of(rows: Sequence[Row], to: pa.Schema, where: str) -> pa.Table:
    """Rows given as mappings as an Arrow table with exactly the schema `to`; every row must have every column.

    Raises PermanentError as `conform` does; inside a struct a key may be absent (null) but not unknown.
    """
    want = set(to.names)
    nested = [field for field in to if pa.types.is_nested(field.type)]
    for row in rows:
        if row.keys() != want:
            _same_columns(set(row), want, f"{where}, row {row.get('id')},")
        for field in nested:
            unknown = _unknown_key(row[field.name], field.type)
            if unknown is not None:
                raise _misfit(where, f"row {row.get('id')} has the key {unknown!r} in {field.name!r}: {field.type}")
    try:
        table = pa.Table.from_pylist(list(rows), schema=to)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise _misfit(where, str(error)) from error
    return _without_forbidden_nulls(table, where)


def _same_columns(have: set[str], want: set[str], where: str) -> None:
    if have != want:
        raise PermanentError(
            f"{where} produced the columns {sorted(have)} but declares {sorted(want)}.",
            todo="Make the stage write every declared column and no other.",
        )


def _misfit(where: str, why: str) -> PermanentError:
    return PermanentError(
        f"{where} produced values that don't fit its declared schema: {why}.",
        todo="Fix the types in the stage or raise its version with a new schema.",
    )


def _without_forbidden_nulls(table: pa.Table, where: str) -> pa.Table:
    for field in table.schema:
        if not field.nullable and table.column(field.name).null_count:
            raise PermanentError(f"{where} wrote a null into {field.name!r}.", todo="Every row needs a value there.")
    return table


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether a cast is a change of width or of container, never of meaning: Arrow would parse "12" into a number."""
    if pa.types.is_null(have):
        return True
    if pa.types.is_dictionary(have):
        return _fits(have.value_type, want)
    if _is_list(have) and _is_list(want):
        return _fits(have.value_type, want.value_type)
    if pa.types.is_struct(have) and pa.types.is_struct(want):
        fields = {field.name: field.type for field in have}
        return {field.name for field in want} == set(fields) and all(
            _fits(fields[field.name], field.type) for field in want
        )
    if pa.types.is_floating(have) and pa.types.is_integer(want):
        return False
    return _kind(have) == _kind(want)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _kind(kind: pa.DataType) -> object:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "bytes"
    return pa.types.is_temporal(kind) or kind


def _unknown_key(value: Any, kind: pa.DataType) -> str | None:
    """A key inside `value` that the type lacks, which Arrow would drop without a word."""
    if value is None or not pa.types.is_nested(kind):
        return None
    if pa.types.is_struct(kind):
        if not isinstance(value, Mapping):
            return None
        fields = {field.name: field.type for field in kind}
        unknown = next((key for key in value if key not in fields), None)
        if unknown is not None:
            return str(unknown)
        return next(filter(None, (_unknown_key(value[name], fields[name]) for name in value)), None)
    if not _is_list(kind) or not pa.types.is_nested(kind.value_type):
        return None
    return next(filter(None, (_unknown_key(item, kind.value_type) for item in value)), None)
