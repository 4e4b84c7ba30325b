"""Row ids never change, and a table is taken only if it is exactly what its stage declared."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import PermanentError
from headwater.core.rows import MESSAGES, Reject, conform, row_id, schema, table_of
from headwater.core.seeds import derive_seed

TEXTS = schema(text=pa.string(), score=pa.float64())
CHATS = schema(messages=MESSAGES)


def test_row_ids_are_the_same_forever() -> None:
    """What `printf '["load",["a","b"],3]' | sha256sum` begins with."""
    assert row_id("load", ["a", "b"], 3) == "000e6ea50f1a80afaa89c1dacc2ba0a2"
    assert row_id("load", [], 0) == row_id("load", [])


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3), st.integers(0, 3), st.integers(0, 3))
def test_row_ids_are_equal_only_for_equal_parents_and_samples(a: list[str], b: list[str], i: int, j: int) -> None:
    assert (row_id("s", a, i) == row_id("s", b, j)) == ((a, i) == (b, j))


def test_row_ids_depend_on_the_order_of_parents_and_on_the_stage() -> None:
    assert len({row_id("s", ["a", "b"]), row_id("s", ["b", "a"]), row_id("t", ["a", "b"]), row_id("s", ["ab"])}) == 4


def test_seeds_are_the_same_forever_and_fit_a_signed_64_bit_integer() -> None:
    assert derive_seed(0, "row", 1) == 5888657888212679856
    seeds = {derive_seed(run, "row", sample) for run in range(50) for sample in range(50)}
    assert len(seeds) == 2_500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_a_schema_begins_with_an_id_that_is_never_null() -> None:
    assert TEXTS.names == ["id", "text", "score"]
    assert not TEXTS.field("id").nullable


def test_columns_are_matched_by_name() -> None:
    frame = pl.DataFrame({"score": [1, 2], "id": ["a", "b"], "text": ["x", None]})
    table = conform(frame, TEXTS, "here")
    assert table.schema.equals(TEXTS)
    assert table.to_pylist() == [{"id": "a", "text": "x", "score": 1.0}, {"id": "b", "text": None, "score": 2.0}]


def test_struct_fields_are_matched_by_name_too() -> None:
    frame = pl.DataFrame({"id": ["a"], "messages": [[{"content": "hi", "role": "user"}]]})
    assert conform(frame, CHATS, "here").to_pylist()[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_a_column_of_nulls_takes_the_declared_type() -> None:
    frame = pl.DataFrame({"id": ["a"], "text": [None], "score": [None]})
    assert conform(frame, TEXTS, "here").schema.equals(TEXTS)


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"id": ["a"], "text": ["x"]}, "score"),
        ({"id": ["a"], "text": ["x"], "score": [1.0], "extra": [1]}, "extra"),
        ({"id": ["a"], "text": [12], "score": [1.0]}, "text"),
        ({"id": ["a"], "text": ["x"], "score": ["12"]}, "score"),
        ({"id": ["a"], "text": ["x"], "score": [True]}, "score"),
        ({"id": [None], "text": ["x"], "score": [1.0]}, "id"),
        ({"id": ["a"], "text": [["x"]], "score": [1.0]}, "text"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_stage_and_the_column(columns: dict[str, Any], names: str) -> None:
    with pytest.raises(PermanentError, match=names) as caught:
        conform(pl.DataFrame(columns), TEXTS, "Stage here")
    assert "Stage here" in str(caught.value)


def test_a_float_is_not_cut_to_an_integer_even_when_it_is_whole() -> None:
    with pytest.raises(PermanentError, match="count"):
        conform(pl.DataFrame({"id": ["a"], "count": [9.0]}), schema(count=pa.int64()), "here")


def test_an_unknown_key_inside_a_struct_is_an_error() -> None:
    frame = pl.DataFrame({"id": ["a"], "messages": [[{"role": "user", "content": "hi", "name": "me"}]]})
    with pytest.raises(PermanentError, match="messages"):
        conform(frame, CHATS, "here")
    with pytest.raises(PermanentError, match="name"):
        table_of(frame.to_dicts(), CHATS, "here")


def test_rows_become_a_table_of_the_declared_schema() -> None:
    rows: list[dict[str, Any]] = [{"text": None, "id": "a", "score": 1}, {"id": "b", "text": "x", "score": 2.5}]
    table = table_of(rows, TEXTS, "here")
    assert table.schema.equals(TEXTS)
    assert table.to_pylist() == [{"id": "a", "text": None, "score": 1.0}, {"id": "b", "text": "x", "score": 2.5}]


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "b", "text": "x"},
        {"id": "b", "text": "x", "score": 1.0, "extra": 1},
        {"id": None, "text": "x", "score": 1.0},
        {"id": "b", "text": 12, "score": 1.0},
        {"id": "b", "text": "\ud800", "score": 1.0},
        {"id": "b", "text": "x", "score": "12"},
    ],
)
def test_every_single_row_must_fit(bad: dict[str, Any]) -> None:
    with pytest.raises(PermanentError, match="Stage here"):
        table_of([{"id": "a", "text": "x", "score": 1.0}, bad], TEXTS, "Stage here")


def test_an_integer_too_large_for_its_column_is_an_error() -> None:
    with pytest.raises(PermanentError, match="declared schema"):
        table_of([{"id": "a", "n": 2**70}], schema(n=pa.int64()), "here")


def test_a_reject_can_always_be_stored() -> None:
    row = Reject("a", "garbage", "said \ud800", "nul \x00 and half \udc00").as_row()
    assert row == {"id": "a", "reason": "garbage", "detail": "said \ufffd", "raw": "nul  and half \ufffd"}
