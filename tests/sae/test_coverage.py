"""Coverage against hand-counted cases, and against dense arithmetic on random tables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_array

from headwater.core.errors import ConfigError
from headwater.sae import coverage_table
from headwater.sae.coverage import (
    Activations,
    concatenate,
    fac,
    fired,
    missing_coverage,
    quantile_delta,
    set_difference_mask,
    support,
    sweep,
)

LISTS = ("indptr", "features", "values", "positions", "n_tokens")


def table(dense: list[list[float]] | NDArray[np.float32]) -> Activations:
    rows = csr_array(np.asarray(dense, dtype=np.float32))
    lengths = np.full(rows.shape[0], 10, dtype=np.int32)
    peaks = np.arange(rows.nnz, dtype=np.int32) % 10
    return Activations(
        rows.indptr.astype(np.int64), rows.indices.astype(np.int32), rows.data, peaks, lengths, rows.shape[1]
    )


def random_dense(seed: int, rows: int = 40, width: int = 30) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    dense = rng.exponential(2.0, size=(rows, width)) * (rng.random((rows, width)) < rng.random(width) * 0.3)
    return dense.astype(np.float32)


def same(first: Activations, second: Activations) -> bool:
    return first.width == second.width and all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in LISTS
    )


ANCHOR = table([[3, 0, 1, 0, 0], [3, 2, 0, 0, 0], [0, 4, 1, 0, 0], [0, 0, 0, 8, 0]])
SEED = table([[1, 0, 0, 0, 9], [5, 0, 0, 0, 0]])
GENERATED = table([[0, 2, 0, 0, 0], [0, 0, 0.5, 3, 0]])


def test_a_feature_fires_only_above_delta() -> None:
    assert support(ANCHOR, 0.0).tolist() == [2, 2, 2, 1, 0]
    assert support(ANCHOR, 1.0).tolist() == [2, 2, 0, 1, 0]
    assert fired(ANCHOR, 0.0, min_support=2).tolist() == [True, True, True, False, False]


def test_fac_matches_the_hand_count() -> None:
    result = fac(GENERATED, ANCHOR, 0.0)

    # Generated rows fire 1, 2, 3 of the anchor's 0, 1, 2, 3.
    assert (result.n_covered, result.n_anchor) == (3, 4)
    assert result.binary == pytest.approx(3 / 4)
    # Anchor rows fire 0, 1, 2, 3 at rates 2/4, 2/4, 2/4, 1/4.
    assert result.frequency == pytest.approx((0.5 + 0.5 + 0.25) / 1.75)
    # Their mean activations when firing are 3, 3, 1, 8.
    assert result.magnitude == pytest.approx((3 + 1 + 8) / 15)


def test_minimum_support_binds_the_anchor_and_not_the_generated_rows() -> None:
    result = fac(GENERATED, ANCHOR, 0.0, min_support=2)
    assert (result.n_covered, result.n_anchor) == (2, 3)


def test_irrelevant_features_stay_out_of_both_sides() -> None:
    relevant = np.array([False, True, False, True, True])
    result = fac(GENERATED, ANCHOR, 0.0, relevant=relevant)
    assert (result.binary, result.n_anchor) == (1.0, 2)


def test_a_mask_of_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 entries.*has 5"):
        fac(GENERATED, ANCHOR, 0.0, relevant=np.ones(4, dtype=np.bool_))


def test_an_anchor_that_fires_nothing_has_no_coverage() -> None:
    result = fac(GENERATED, ANCHOR, 100.0)
    assert (result.binary, result.frequency, result.magnitude, result.n_anchor) == (None, None, None, 0)


@pytest.mark.parametrize("delta", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("min_support", [1, 3])
def test_fac_equals_dense_arithmetic_on_random_tables(delta: float, min_support: int) -> None:
    anchor, generated = random_dense(1), random_dense(2, rows=7)
    on = anchor > delta
    target = [i for i in range(anchor.shape[1]) if on[:, i].sum() >= min_support]
    hit = [i for i in target if (generated[:, i] > delta).any()]
    rate = {i: on[:, i].mean() for i in target}
    mean = {i: anchor[on[:, i], i].astype(np.float64).mean() for i in target}

    result = fac(table(generated), table(anchor), delta, min_support=min_support)

    assert 0 < len(hit) < len(target)
    assert result.binary == pytest.approx(len(hit) / len(target))
    assert result.frequency == pytest.approx(sum(rate[i] for i in hit) / sum(rate.values()))
    assert result.magnitude == pytest.approx(sum(mean[i] for i in hit) / sum(mean.values()))


def test_missing_coverage_counts_only_missing_features() -> None:
    missing = set_difference_mask(ANCHOR, SEED, 0.0, min_support=1)
    assert missing.tolist() == [False, True, True, True, False]
    assert missing_coverage(GENERATED, missing, 0.0) == 1.0
    assert missing_coverage(GENERATED, missing, 1.0) == pytest.approx(2 / 3)
    assert missing_coverage(GENERATED, np.zeros(5, dtype=np.bool_), 0.0) is None


def test_quantile_delta_looks_at_positive_values_alone() -> None:
    values = np.array([0, 0, 0, 1, 2, 3, 4, 5], dtype=np.float32)
    assert quantile_delta(values, 0.5) == 3.0
    assert quantile_delta(values, 0.25) == 2.0
    with pytest.raises(ConfigError, match="No feature fires"):
        quantile_delta(np.zeros(3, dtype=np.float32), 0.5)


def test_a_sweep_reports_every_delta_by_hand_count() -> None:
    low, high = sweep(ANCHOR, SEED, GENERATED, [0.0, 0.5])

    # The anchor's positive values are 1 1 2 3 3 4 8: δ = 1 at the bottom, 3 in the middle.
    assert (low.delta, high.delta) == (1.0, 3.0)
    assert (low.n_anchor, low.n_seed, low.n_missing) == (3, 2, 2)
    assert low.fac_before == pytest.approx(1 / 3)
    assert low.fac_after == 1.0
    assert low.missing_covered == 1.0
    assert (high.n_anchor, high.n_seed, high.n_missing) == (2, 2, 2)
    assert (high.fac_before, high.fac_after, high.missing_covered) == (0.0, 0.0, 0.0)


def test_a_sweep_counts_what_the_caller_calls_missing() -> None:
    [point] = sweep(ANCHOR, SEED, GENERATED, [0.0], find_missing=lambda delta: fired(ANCHOR, delta))
    assert point.n_missing == 3
    assert point.missing_covered == pytest.approx(2 / 3)


def test_two_feature_spaces_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="widths 3 and 5"):
        fac(table([[1, 0, 0]]), ANCHOR, 0.0)


def test_counting_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = random_dense(3)
    whole = support(table(dense), 1.0)
    monkeypatch.setattr(coverage_table, "ENTRIES_PER_BLOCK", 7)
    assert np.array_equal(support(table(dense), 1.0), whole)
    assert np.array_equal(whole, (dense > 1.0).sum(axis=0))


def test_a_table_survives_the_frame_and_parquet(tmp_path: Path) -> None:
    activations = table(random_dense(4, rows=9))
    frame = activations.to_frame()
    assert frame.schema == {
        "n_tokens": pl.Int32,
        "features": pl.List(pl.Int32),
        "values": pl.List(pl.Float32),
        "positions": pl.List(pl.Int32),
    }
    frame.write_parquet(tmp_path / "features.parquet")
    assert same(Activations.from_frame(pl.read_parquet(tmp_path / "features.parquet"), 30), activations)


def test_a_slice_of_a_frame_with_silent_rows_is_read_right() -> None:
    activations = table([[0, 0], [1, 2], [0, 0], [0, 3], [0, 0]])
    part = Activations.from_frame(activations.to_frame()[1:4], 2)
    assert same(part, activations.take([1, 2, 3]))
    assert part.n_rows == 3


def test_an_empty_table_round_trips() -> None:
    empty = table(np.zeros((0, 4), dtype=np.float32))
    assert same(Activations.from_frame(empty.to_frame(), 4), empty)
    assert support(empty, 0.0).tolist() == [0, 0, 0, 0]


@dataclass
class Pooled:
    row: int
    n_tokens: int
    features: NDArray[np.int32]
    values: NDArray[np.float32]
    positions: NDArray[np.int32]


def pooled_rows(activations: Activations) -> list[Pooled]:
    bounds = zip(activations.indptr[:-1], activations.indptr[1:], strict=True)
    return [
        Pooled(
            row,
            int(activations.n_tokens[row]),
            activations.features[a:b],
            activations.values[a:b],
            activations.positions[a:b],
        )
        for row, (a, b) in enumerate(bounds)
    ]


def test_rows_may_arrive_in_any_order() -> None:
    activations = table(random_dense(5, rows=6))
    assert same(Activations.from_rows(reversed(pooled_rows(activations)), 30), activations)


def test_a_gap_in_the_row_numbers_is_an_error() -> None:
    rows = pooled_rows(table([[1, 0], [0, 1], [1, 1]]))
    with pytest.raises(ConfigError, match="Row 1 has no activations"):
        Activations.from_rows([rows[0], rows[2]], 2)


@given(st.lists(st.integers(0, 11), max_size=20))
def test_taking_rows_equals_indexing_the_dense_matrix(rows: list[int]) -> None:
    dense = random_dense(6, rows=12)
    assert np.array_equal(support(table(dense).take(rows), 0.0), (dense[rows] > 0).sum(axis=0))
    assert np.array_equal(table(dense).take(rows).values, table(dense[rows]).values)


def test_concatenation_stacks_rows() -> None:
    top, bottom = random_dense(7, rows=3), random_dense(8, rows=4)
    stacked = concatenate(table(top), table(bottom))
    assert np.array_equal(stacked.features, table(np.vstack([top, bottom])).features)
    assert np.array_equal(stacked.indptr, table(np.vstack([top, bottom])).indptr)


@pytest.mark.parametrize(
    ("features", "values", "message"),
    [
        ([0, 1, 2, 2], [1, 1, 1, 1], "Row 1 lists a feature twice"),
        ([0, 1, 3, 2], [1, 1, 1, 1], "Row 1 lists a feature twice or out of order"),
        ([0, 1, 2, 5], [1, 1, 1, 1], "Row 1 names a feature outside 0 to 4"),
        ([0, 1, 2, 3], [1, np.nan, 1, 1], "Row 0 has an activation"),
        ([0, 1, 2, 3], [1, 1, 1, -1], "Row 1 has an activation"),
    ],
)
def test_a_damaged_table_names_the_row(
    features: list[int], values: list[float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in (2, 3, 100):
        monkeypatch.setattr(coverage_table, "ENTRIES_PER_BLOCK", block)
        with pytest.raises(ConfigError, match=message):
            Activations(
                np.array([0, 2, 4]),
                np.array(features, dtype=np.int32),
                np.array(values, dtype=np.float32),
                np.zeros(4, dtype=np.int32),
                np.ones(2, dtype=np.int32),
                5,
            )


def test_a_feature_may_descend_where_a_new_row_begins() -> None:
    assert table([[0, 0, 1], [1, 0, 0]]).features.tolist() == [2, 0]


def test_lists_of_different_lengths_name_the_row() -> None:
    frame = pl.DataFrame({"n_tokens": [4, 4], "features": [[1], [2]], "values": [[1.0], []], "positions": [[0], [0]]})
    with pytest.raises(ConfigError, match="Row 1: `values`"):
        Activations.from_frame(frame, 5)


def test_a_null_list_names_the_row() -> None:
    frame = table([[1, 0], [0, 1]]).to_frame().with_columns(values=pl.Series([[1.0], None], dtype=pl.List(pl.Float32)))
    with pytest.raises(ConfigError, match="Row 1: `values` is null"):
        Activations.from_frame(frame, 2)


def test_five_million_entries_are_counted_right() -> None:
    rng = np.random.default_rng(9)
    rows, per_row, width = 100_000, 50, 8_192
    gaps = rng.integers(1, width // per_row, size=(rows, per_row), dtype=np.int32)
    features = np.cumsum(gaps, axis=1, dtype=np.int32).ravel() - 1
    values = rng.random(rows * per_row, dtype=np.float32)
    big = Activations(
        np.arange(rows + 1, dtype=np.int64) * per_row,
        features,
        values,
        np.zeros(rows * per_row, dtype=np.int32),
        np.full(rows, 64, dtype=np.int32),
        width,
    )
    expected = np.unique(features[values > 0.5], return_counts=True)
    counts = support(big, 0.5)
    assert np.array_equal(np.flatnonzero(counts), expected[0])
    assert np.array_equal(counts[counts > 0], expected[1])


def test_coverage_and_its_relatives_load_without_torch_or_datatrove() -> None:
    modules = [f"headwater.sae.{name}" for name in ("coverage", "missing", "nulls", "spans", "interpret", "clusters")]
    modules.append("headwater.stages.curate.near_duplicates")
    script = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'datatrove') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
