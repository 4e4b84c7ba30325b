"""The missing set: hand-counted cases, exact tests against scipy's and against simulation."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.sparse import csr_array

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations
from headwater.sae.missing import benjamini_hochberg, fisher_one_sided, rate_test, set_difference


def table(dense: list[list[float]] | NDArray[np.floating], n_tokens: int = 10) -> Activations:
    rows = csr_array(np.asarray(dense, dtype=np.float32))
    lengths = np.full(rows.shape[0], n_tokens, dtype=np.int32)
    peaks = np.arange(rows.nnz, dtype=np.int32) % n_tokens
    return Activations(
        rows.indptr.astype(np.int64), rows.indices.astype(np.int32), rows.data, peaks, lengths, rows.shape[1]
    )


def rows_firing(rates: NDArray[np.float64], rows: int, seed: int) -> Activations:
    rng = np.random.default_rng(seed)
    return table((rng.random((rows, len(rates))) < rates) * rng.uniform(1, 5, (rows, len(rates))))


ANCHOR = table([[3, 0, 1, 0], [5, 2, 0, 0], [0, 7, 4, 0], [0, 7, 0, 8]])
SEED = table([[1, 0, 0, 0], [0.5, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]])


def test_the_set_difference_by_hand() -> None:
    missing = set_difference(ANCHOR, SEED, 0.0, min_support=2)

    assert missing.features.tolist() == [1]
    assert (missing.anchor_support.tolist(), missing.seed_support.tolist()) == ([3], [0])
    assert missing.p_value[0] == pytest.approx(comb(4, 3) / comb(8, 3))
    assert missing.warnings == ()


def test_delta_and_support_decide_what_is_missing() -> None:
    assert set_difference(ANCHOR, SEED, 0.0, min_support=1).features.tolist() == [1, 3]
    assert set_difference(ANCHOR, SEED, 2.0, min_support=1).features.tolist() == [0, 1, 2, 3]
    assert set_difference(ANCHOR, SEED, 2.0, min_support=2).features.tolist() == [0, 1]


def test_a_peak_is_the_first_row_with_the_largest_value() -> None:
    missing = set_difference(ANCHOR, SEED, 2.0, min_support=1)
    assert missing.anchor_max.tolist() == [5, 7, 4, 8]
    assert missing.peak_row.tolist() == [1, 2, 2, 3]
    # Entries are numbered row by row, and the positions of this table count them.
    assert missing.peak_position.tolist() == [2, 4, 5, 7]


def test_irrelevant_features_are_never_missing() -> None:
    relevant = np.array([True, False, True, True])
    assert set_difference(ANCHOR, SEED, 0.0, min_support=1, relevant=relevant).features.tolist() == [3]


def test_a_seed_that_equals_the_anchor_lacks_nothing() -> None:
    assert len(set_difference(ANCHOR, ANCHOR, 0.0, min_support=1)) == 0
    assert len(rate_test(ANCHOR, ANCHOR, 0.0, min_support=1)) == 0


def test_the_set_difference_warns_when_sizes_differ() -> None:
    missing = set_difference(ANCHOR, SEED.take([0]), 0.0, min_support=1)
    [warning] = missing.warnings
    assert "anchor has 4 rows and the seed 1" in warning
    assert "3 of 3 missing features" in warning
    assert "rate test" in warning


def test_the_set_difference_warns_when_only_the_lengths_differ() -> None:
    long_anchor = table(np.eye(4), n_tokens=50)
    assert "200 tokens and the seed 40" in set_difference(long_anchor, SEED, 0.0, min_support=1).warnings[0]


def test_the_rate_test_does_not_warn_about_size() -> None:
    warnings = rate_test(ANCHOR, SEED.take([0]), 0.0, alpha=0.4, min_support=1).warnings
    assert not any("size" in warning for warning in warnings)


@pytest.mark.parametrize(("n_anchor", "n_seed"), [(12, 5), (200, 70), (30, 400)])
def test_fisher_agrees_with_scipy_for_every_table(n_anchor: int, n_seed: int) -> None:
    rng = np.random.default_rng(0)
    a, s = rng.integers(0, n_anchor + 1, 60), rng.integers(0, n_seed + 1, 60)
    expected = [
        stats.fisher_exact([[x, n_anchor - x], [y, n_seed - y]], alternative="greater").pvalue
        for x, y in zip(a, s, strict=True)
    ]
    np.testing.assert_allclose(fisher_one_sided(a, s, n_anchor, n_seed), expected, rtol=1e-9, atol=1e-300)


def test_fisher_by_hand() -> None:
    # Lady tasting tea: 3 of 4 right or better is (16 + 1) of 70 orders.
    assert fisher_one_sided(np.array([3]), np.array([1]), 4, 4)[0] == pytest.approx(17 / 70)


def test_fisher_stays_exact_far_out_and_for_a_million_rows() -> None:
    a, s = np.array([900, 3_000, 40]), np.array([250, 800, 0])
    expected = stats.hypergeom.sf(a - 1, 1_500_000, a + s, 1_000_000)
    assert 0 < expected.min() < 1e-60
    np.testing.assert_allclose(fisher_one_sided(a, s, 1_000_000, 500_000), expected, rtol=1e-7)


def test_no_candidates_means_nothing_missing() -> None:
    assert len(rate_test(ANCHOR, SEED, 100.0)) == 0
    assert len(set_difference(ANCHOR, SEED, 100.0)) == 0


def test_benjamini_hochberg_by_hand_and_against_scipy() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.5])
    assert benjamini_hochberg(p).tolist() == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    draws = np.random.default_rng(1).random(500)
    np.testing.assert_allclose(benjamini_hochberg(draws), stats.false_discovery_control(draws, method="bh"))


def test_the_rate_test_finds_weakened_features_that_the_set_difference_overlooks() -> None:
    rates = np.full(50, 0.2)
    weaker = rates.copy()
    weaker[:10] = 0.02
    anchor, seed = rows_firing(rates, 400, seed=2), rows_firing(weaker, 400, seed=3)

    found = rate_test(anchor, seed, 0.0, control_false_discoveries=True)

    assert set(range(10)) <= set(found.features.tolist())
    assert len(found) <= 11
    assert len(set_difference(anchor, seed, 0.0)) == 0


def test_size_alone_fills_the_set_difference_but_not_the_rate_test() -> None:
    rates = np.full(2_000, 0.01)
    anchor, seed = rows_firing(rates, 1_000, seed=4), rows_firing(rates, 100, seed=5)

    by_difference = set_difference(anchor, seed, 0.0)

    assert len(by_difference) > 600
    assert len(rate_test(anchor, seed, 0.0)) < 100
    assert len(rate_test(anchor, seed, 0.0, control_false_discoveries=True)) == 0
    assert f"{len(by_difference)} of {len(by_difference)}" in by_difference.warnings[0]


def test_uncorrected_p_values_keep_their_level_under_equal_rates() -> None:
    rates = np.full(4_000, 0.3)
    anchor, seed = rows_firing(rates, 300, seed=6), rows_firing(rates, 200, seed=7)
    found = rate_test(anchor, seed, 0.0, alpha=0.05)
    assert 0.02 < len(found) / 4_000 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4_000)


def test_the_mask_and_the_frame_tell_the_same_features() -> None:
    missing = set_difference(ANCHOR, SEED, 0.0, min_support=1)
    assert np.flatnonzero(missing.mask).tolist() == missing.to_frame()["feature"].to_list() == [1, 3]
    assert missing.to_frame()["peak_row"].to_list() == [2, 3]


def test_the_rate_test_says_how_many_finds_could_be_chance() -> None:
    rates = np.full(400, 0.3)
    anchor, seed = rows_firing(rates, 300, seed=8), rows_firing(rates, 200, seed=9)
    found = rate_test(anchor, seed, 0.0)
    assert found.n_tested == 400
    [warning] = found.warnings
    assert "400 features were tested at p <= 0.05: chance alone passes up to 20 on average" in warning
    assert f"{len(found)} were found" in warning


def test_the_correction_says_what_it_leaves_out() -> None:
    rates = np.full(400, 0.3)
    anchor, seed = rows_firing(rates, 300, seed=8), rows_firing(rates, 200, seed=9)
    n_uncorrected = len(rate_test(anchor, seed, 0.0))
    [warning] = rate_test(anchor, seed, 0.0, control_false_discoveries=True).warnings
    assert warning.startswith("0 of 400 features tested pass the rate test after the correction for false discov")
    assert f"{n_uncorrected} before it" in warning


def test_one_missing_kind_among_twenty_four_is_found_only_without_the_correction() -> None:
    in_anchor, in_seed = np.zeros((336, 2_000)), np.zeros((128, 2_000))
    in_anchor[:14, 0] = 1
    in_anchor[14:100, 1:], in_seed[:33, 1:] = 1, 1
    anchor, seed = table(in_anchor), table(in_seed)
    found = rate_test(anchor, seed, 0.0)
    assert found.features.tolist() == [0]
    assert found.p_value[0] == pytest.approx(stats.hypergeom.sf(13, 464, 14, 336))
    assert found.p_value[0] == pytest.approx(0.0107, abs=1e-3)
    assert len(rate_test(anchor, seed, 0.0, control_false_discoveries=True)) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0])
def test_a_senseless_level_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        rate_test(ANCHOR, SEED, 0.0, alpha=alpha)


def test_a_support_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_support is 0"):
        set_difference(ANCHOR, SEED, 0.0, min_support=0)
