"""Spans: the peak is in, the cut is right, and silent spans give nothing away."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations
from headwater.sae.spans import SPAN_TOKENS, Span, collect_spans, contrast, moved, silent_spans

ROWS = [[f" w{row}.{token}" for token in range(40)] for row in range(12)]


def activations_of(entries: list[tuple[int, int, float, int]], n_rows: int = 12, width: int = 6) -> Activations:
    """From (row, feature, value, position), sorted."""
    rows = np.array([entry[0] for entry in entries], dtype=np.int64)
    return Activations(
        np.searchsorted(rows, np.arange(n_rows + 1)).astype(np.int64),
        np.array([entry[1] for entry in entries], dtype=np.int32),
        np.array([entry[2] for entry in entries], dtype=np.float32),
        np.array([entry[3] for entry in entries], dtype=np.int32),
        np.full(n_rows, 40, dtype=np.int32),
        width,
    )


TABLE = activations_of(
    [(0, 2, 1.0, 0), (1, 2, 9.0, 35), (3, 1, 4.0, 7), (3, 2, 5.0, 8), (7, 2, 5.0, 39), (9, 2, 0.5, 3)]
)


def span(*tokens: str) -> Span:
    return Span(0, 1.0, tokens, 0, len(tokens) - 1)


def texts(row: int) -> list[str]:
    return ROWS[row]


def test_a_span_ends_with_the_peak_token_and_holds_at_most_32() -> None:
    [top] = collect_spans(TABLE, [2], texts, n_top=1)[2]
    assert top.tokens == tuple(ROWS[1][4:36])
    assert len(top.tokens) == SPAN_TOKENS
    assert top.tokens[-1] == " w1.35"
    assert (top.row, top.value, top.start, top.peak) == (1, 9.0, 4, 31)


def test_a_peak_at_the_first_token_gives_a_span_of_one() -> None:
    spans = collect_spans(TABLE, [2], texts)[2]
    assert [span.tokens for span in spans if span.row == 0] == [(" w0.0",)]


def test_the_strongest_come_first_and_ties_go_to_the_earlier_row() -> None:
    assert [span.row for span in collect_spans(TABLE, [2], texts)[2]] == [1, 3, 7, 0, 9]


def test_rows_at_or_below_delta_are_left_out() -> None:
    assert [span.row for span in collect_spans(TABLE, [2], texts, delta=1.0)[2]] == [1, 3, 7]


def test_every_feature_gets_its_own_spans_and_a_dead_one_none() -> None:
    spans = collect_spans(TABLE, [4, 1, 2], texts, n_top=2)
    assert {feature: [span.row for span in found] for feature, found in spans.items()} == {4: [], 1: [3], 2: [1, 3]}


def test_quantile_spans_step_evenly_from_below_the_top_to_the_weakest() -> None:
    table = activations_of([(row, 0, 20.0 - row, 1) for row in range(12)])
    assert [span.row for span in collect_spans(table, [0], texts, n_top=2, n_quantile=4)[0]] == [0, 1, 2, 5, 8, 11]
    assert len(collect_spans(table, [0], texts, n_top=2, n_quantile=30)[0]) == 12


@pytest.mark.parametrize("seed", range(4))
def test_top_spans_equal_a_sort_of_the_dense_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dense: NDArray[np.float64] = np.round(rng.exponential(1, (12, 6)) * (rng.random((12, 6)) < 0.6), 1)
    table = activations_of([(r, f, dense[r, f], (r + f) % 40) for r in range(12) for f in range(6) if dense[r, f] > 0])
    for feature, spans in collect_spans(table, range(6), texts, n_top=5, delta=0.3).items():
        expected = sorted((r for r in range(12) if dense[r, feature] > 0.3), key=lambda r: (-dense[r, feature], r))[:5]
        assert [span.row for span in spans] == expected
        assert [span.tokens[-1] for span in spans] == [ROWS[r][(r + feature) % 40] for r in expected]


def test_texts_cut_differently_than_the_features_are_an_error() -> None:
    with pytest.raises(ConfigError, match="Row 1 has 20 tokens, but feature 2 peaks at token 35"):
        collect_spans(TABLE, [2], lambda row: ROWS[row][:20])


def test_silent_spans_come_from_rows_without_the_feature() -> None:
    like = collect_spans(TABLE, [2], texts)[2]
    silent = silent_spans(TABLE, 2, texts, like=like, n=5, rng=np.random.default_rng(0))
    assert len({span.row for span in silent}) == 5
    assert not {span.row for span in silent} & {0, 1, 3, 7, 9}
    assert {len(span.tokens) for span in silent} <= {len(span.tokens) for span in like}
    assert {span.value for span in silent} == {0.0}


def test_silent_spans_are_as_long_as_asked_and_end_anywhere() -> None:
    like = [span(*"abcdefghij")]
    draws = [silent_spans(TABLE, 1, texts, like=like, n=11, rng=np.random.default_rng(seed)) for seed in range(60)]
    spans = [span for draw in draws for span in draw]
    assert {len(span.tokens) for span in spans} == {10}
    ends = {int(span.tokens[-1].split(".")[1]) for span in spans}
    assert ends == set(range(9, 40))


def test_too_few_silent_rows_give_fewer_spans() -> None:
    like = collect_spans(TABLE, [2], texts)[2]
    assert len(silent_spans(TABLE, 2, texts, like=like, n=50, rng=np.random.default_rng(0))) == 7


def test_the_marker_embraces_the_peak_and_not_the_space_before_it() -> None:
    assert span("I", " like", " wool").marked == "I like <<wool>>"
    assert span("I", " like", " wool").mark(1) == "I <<like>> wool"
    assert span("end", "\n").marked == "end<<\n>>"


def test_markers_of_the_text_itself_are_pulled_apart() -> None:
    marked = span("16-3=", "<<16-3=13>>", "13", " eggs>>").mark(2)
    assert marked == "16-3=< <16-3=13> ><<13>> eggs> >"
    assert span("a <", "b", "> c").mark(1) == "a < <<b>> > c"


@given(st.lists(st.text(alphabet="ab <>\n", max_size=4), min_size=1, max_size=8), st.data())
def test_there_is_always_exactly_one_pair_of_markers(tokens: list[str], data: st.DataObject) -> None:
    marked = span(*tokens).mark(data.draw(st.integers(0, len(tokens) - 1)))
    assert marked.count("<<") == marked.count(">>") == 1
    assert marked.index("<<") < marked.index(">>")


def test_a_peak_on_a_later_byte_of_a_character_marks_the_character() -> None:
    assert span("so ", "🦆", "", "").marked == "so <<🦆>>"


def test_a_moved_span_keeps_its_peak_and_shows_what_follows() -> None:
    [top] = collect_spans(TABLE, [2], texts, n_top=1)[2]
    windows = [moved(top, texts, np.random.default_rng(seed)) for seed in range(80)]
    assert {window.tokens[window.peak] for window in windows} == {" w1.35"}
    assert {len(window.tokens) for window in windows} == {SPAN_TOKENS}
    assert {window.start for window in windows} == set(range(4, 9))
    assert all(window.tokens == tuple(ROWS[1][window.start :][:SPAN_TOKENS]) for window in windows)


def test_a_span_of_a_short_row_moves_to_the_whole_row() -> None:
    short = Span(5, 1.0, ("a", "b"), 0, 1)
    assert moved(short, lambda row: ["a", "b", "c"], np.random.default_rng(0)).tokens == ("a", "b", "c")


def test_a_mark_elsewhere_never_falls_on_the_peak_or_its_like() -> None:
    whole = Span(0, 1.0, ("Duck", " and", " goose", "\n", " duck"), 0, 4)
    marks = {whole.marked_elsewhere(np.random.default_rng(seed)) for seed in range(30)}
    assert marks == {"Duck <<and>> goose\n duck", "Duck and <<goose>>\n duck"}
    assert span("duck", " Duck").marked_elsewhere(np.random.default_rng(0)) is None


def test_contrasting_texts_are_equally_many_equally_long_and_of_different_rows() -> None:
    spans = collect_spans(TABLE, [2], texts)[2]
    active, silent = contrast(TABLE, 2, spans, texts, rng=np.random.default_rng(1))
    assert [window.row for window in active] == [span.row for span in spans]
    assert {len(window.tokens) for window in active + silent} == {SPAN_TOKENS}
    assert len(silent) == len(active) == 5
    assert not {window.row for window in silent} & {window.row for window in active}
