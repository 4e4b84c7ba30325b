"""Batches by length, and what rows share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.llm.batching import common_prefix, length_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def test_rows_go_shortest_first_and_ties_by_index() -> None:
    assert length_batches([5, 2, 5, 2, 9], 10) == [[1, 3], [0, 2], [4]]


def test_a_row_above_the_limit_goes_alone() -> None:
    assert length_batches([30, 1, 1], 10) == [[1, 2], [0]]


@given(LENGTHS, st.integers(1, 120))
def test_every_row_is_in_one_batch_and_no_shared_batch_is_too_large(lengths: list[int], limit: int) -> None:
    batches = length_batches(lengths, limit)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in batches)


def test_common_prefix_of_no_rows_is_empty() -> None:
    assert common_prefix([]) == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_common_prefix_is_what_every_row_starts_with_and_no_more(rows: list[list[int]]) -> None:
    shared = common_prefix(rows)
    assert all(row[:shared] == rows[0][:shared] for row in rows)
    longer = {tuple(row[: shared + 1]) for row in rows}
    assert len(longer) > 1 or any(len(row) == shared for row in rows)
