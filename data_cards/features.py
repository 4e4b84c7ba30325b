"""From a pyarrow schema to the `features` list of a card, so that nobody has to infer a type again.

Written out here because importing `datasets` for it costs more than rendering the whole card; a test holds the two
equal.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headwater.core.errors import ConfigError

_SAME_NAME = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_timestamp,
)
"""Types that `datasets` calls what pyarrow calls them."""


def features_of(schema: pa.Schema) -> list[dict[str, Any]]:
    """One entry per column, in the form that `datasets` writes and reads in a card's YAML block."""
    return [{"name": field.name, **_feature(field.name, field.type)} for field in schema]


def type_label(kind: pa.DataType) -> str:
    """How a table of columns names a type: `string`, `list of {role, content}`."""
    if _is_list(kind):
        return f"list of {type_label(kind.value_type)}"
    if pa.types.is_struct(kind):
        return "{" + ", ".join(field.name for field in kind) + "}"
    return _dtype("", kind)


def _feature(name: str, kind: pa.DataType) -> dict[str, Any]:
    if _is_list(kind):
        item = _feature(name, kind.value_type)
        key = "large_list" if pa.types.is_large_list(kind) else "list"
        entry: dict[str, Any] = {key: item["dtype"] if set(item) == {"dtype"} else item.get("struct", item)}
        if pa.types.is_fixed_size_list(kind):
            entry["length"] = kind.list_size
        return entry
    if pa.types.is_struct(kind):
        return {"struct": features_of(pa.schema(list(kind)))}
    return {"dtype": _dtype(name, kind)}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _dtype(name: str, kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_floating(kind):
        return f"float{kind.bit_width}"
    if str(kind) == "extension<arrow.json>":
        return "json"
    if pa.types.is_date(kind):
        return f"date{kind.bit_width}"
    if any(test(kind) for test in _SAME_NAME):
        return str(kind)
    raise ConfigError(
        f"Column {name!r} has the type {kind}, which a Hugging Face dataset cannot declare.",
        todo="Declare it as a string, number, bool, timestamp, struct or list.",
    )
