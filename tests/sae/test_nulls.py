"""The nulls: rank statistics against scikit-learn, and tables where the right answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.metrics import roc_auc_score

from headwater.core.errors import ConfigError
from headwater.sae import nulls
from headwater.sae.coverage import Activations, Mask, fired
from headwater.sae.nulls import (
    auroc,
    firing_score,
    length_matched_coverage,
    random_feature_auroc,
    random_feature_coverage,
)


def table(dense: NDArray[np.floating] | Mask, n_tokens: NDArray[np.int32] | int = 10) -> Activations:
    rows = csr_array(np.asarray(dense, dtype=np.float32))
    lengths = np.broadcast_to(np.asarray(n_tokens, dtype=np.int32), rows.shape[0])
    return Activations(
        rows.indptr.astype(np.int64),
        rows.indices.astype(np.int32),
        rows.data,
        np.zeros(rows.nnz, dtype=np.int32),
        lengths,
        rows.shape[1],
    )


def mask_of(features: range, width: int) -> Mask:
    mask = np.zeros(width, dtype=np.bool_)
    mask[list(features)] = True
    return mask


def texts_of(lengths: NDArray[np.int32], rate_per_token: NDArray[np.float64], seed: int) -> Activations:
    """Every token fires every feature with its rate, so longer rows fire more."""
    rng = np.random.default_rng(seed)
    chance = 1 - (1 - rate_per_token) ** lengths[:, None]
    return table(rng.random(chance.shape) < chance, lengths)


def test_auroc_by_hand_with_a_tie() -> None:
    scores = np.array([3.0, 1.0, 1.0, 0.0])
    # Pairs: 3 beats both negatives; the tied 1 beats 0 and halves with 1.
    assert auroc(scores, np.array([True, True, False, False])) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize("seed", range(5))
def test_auroc_equals_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive = rng.random(200) < 0.3
    scores = np.round(rng.normal(size=200) + positive, 1)
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)


def test_auroc_needs_both_kinds() -> None:
    with pytest.raises(ConfigError, match="3 positive and 0 negative"):
        auroc(np.zeros(3), np.ones(3, dtype=np.bool_))


def test_a_score_divides_by_tokens_or_by_live_features(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(np.array([[1, 2, 0, 3], [0, 0, 5, 0], [0, 0, 0, 0]]), np.array([4, 2, 0], dtype=np.int32))
    features = np.array([True, False, False, True])
    for block in (1, 2, 100):
        monkeypatch.setattr(nulls, "ROWS_PER_BLOCK", block)
        assert firing_score(rows, features, 0.0, per="token") == pytest.approx([2 / 4, 0, 0])
        assert firing_score(rows, features, 0.0, per="live") == pytest.approx([2 / 3, 0, 0])
        assert firing_score(rows, features, 1.0, per="live") == pytest.approx([1 / 2, 0, 0])


def test_features_of_the_missing_kind_beat_the_random_null() -> None:
    rng = np.random.default_rng(0)
    positive = np.arange(120) < 40
    rates = np.full((120, 200), 0.1)
    rates[positive, :15] = 0.4
    rows = table(rng.random(rates.shape) < rates)

    result = random_feature_auroc(rows, positive, mask_of(range(15), 200), delta=0.0, rng=rng)

    assert result.observed > 0.95
    assert len(result.draws) == 20
    assert result.mean < 0.75 < result.observed
    assert result.mean <= result.q95 == pytest.approx(np.quantile(result.draws, 0.95))
    assert result.q95 < result.observed


def test_features_that_belong_to_no_kind_do_not_beat_it() -> None:
    rng = np.random.default_rng(1)
    rows = table(rng.random((400, 200)) < 0.1)
    positive = np.arange(400) < 130
    result = random_feature_auroc(rows, positive, mask_of(range(15), 200), delta=0.0, rng=rng, n_draws=100)
    assert abs(result.mean - 0.5) < 0.02
    assert abs(result.observed - 0.5) < 0.1


def test_each_draw_equals_a_score_computed_one_by_one() -> None:
    rows = table(np.random.default_rng(2).random((50, 30)) < 0.2)
    positive, missing = np.arange(50) < 20, mask_of(range(4), 30)
    live = np.flatnonzero(fired(rows, 0.0))

    result = random_feature_auroc(rows, positive, missing, delta=0.0, rng=np.random.default_rng(3), per="live")

    again = np.random.default_rng(3)
    dense = np.zeros((50, 30))
    dense[rows.rows_of(np.arange(rows.n_entries)), rows.features] = 1
    for draw in result.draws:
        chosen = again.choice(live, 4, replace=False)
        assert draw == pytest.approx(roc_auc_score(positive, dense[:, chosen].sum(1) / dense.sum(1)), abs=1e-6)


def test_dead_features_are_never_drawn() -> None:
    rows = table(np.hstack([np.ones((5, 6)), np.zeros((5, 94))]))
    live = fired(rows, 0.0)
    result = random_feature_coverage(rows, mask_of(range(3), 100), live, delta=0.0, rng=np.random.default_rng(4))
    assert set(result.draws) == {1.0}


def test_random_coverage_averages_to_the_coverage_of_all_live_features() -> None:
    rng = np.random.default_rng(5)
    live = mask_of(range(100), 120)
    generated = table((np.arange(120) < 30) * np.ones((2, 1)))
    result = random_feature_coverage(generated, mask_of(range(20, 40), 120), live, delta=0.0, rng=rng, n_draws=400)
    assert result.observed == 0.5
    assert result.mean == pytest.approx(0.3, abs=0.02)


def test_the_same_generator_state_gives_the_same_null() -> None:
    rows = table(np.random.default_rng(6).random((30, 40)) < 0.3)
    positive, missing = np.arange(30) < 10, mask_of(range(5), 40)
    first, second = (
        random_feature_auroc(rows, positive, missing, delta=0.0, rng=np.random.default_rng(7)) for _ in range(2)
    )
    assert first == second


def test_few_draws_and_an_empty_comparison_are_refused() -> None:
    rows, positive = table(np.eye(4)), np.array([True, True, False, False])
    rng = np.random.default_rng(8)
    with pytest.raises(ConfigError, match="14 draws"):
        random_feature_auroc(rows, positive, mask_of(range(2), 4), delta=0.0, rng=rng, n_draws=14)
    with pytest.raises(ConfigError, match="4 features are missing and 4 are live"):
        random_feature_auroc(rows, positive, mask_of(range(4), 4), delta=0.0, rng=rng)
    with pytest.raises(ConfigError, match="No feature is missing"):
        random_feature_auroc(rows, positive, mask_of(range(0), 4), delta=0.0, rng=rng)


def test_length_alone_looks_like_coverage_until_lengths_are_matched() -> None:
    rng = np.random.default_rng(9)
    rate, features = np.full(400, 0.0004), np.ones(400, dtype=np.bool_)
    short = rng.integers(8, 30, 600).astype(np.int32)
    lengthy = np.concatenate([rng.integers(8, 30, 20), rng.integers(60, 90, 80)]).astype(np.int32)
    generated, pool = texts_of(lengthy, rate, 10), texts_of(np.concatenate([short, lengthy, lengthy]), rate, 11)

    naive = [fired(pool.take(rng.choice(600, 100, replace=False)), 0.0).mean() for _ in range(20)]
    matched = length_matched_coverage(generated, pool, features, delta=0.0, rng=rng)

    assert fired(generated, 0.0).mean() > np.max(naive) + 0.2
    assert matched.n_rows == 100
    assert matched.n_unmatched == 0
    assert matched.comparison.observed == pytest.approx(matched.comparison.mean, abs=0.06)
    assert matched.tokens_pool == pytest.approx(matched.tokens_generated, rel=0.1)


def test_real_surplus_survives_length_matching() -> None:
    rng = np.random.default_rng(12)
    lengths = rng.integers(20, 60, 100).astype(np.int32)
    generated = texts_of(lengths, np.full(400, 0.0008), 13)
    pool = texts_of(rng.integers(20, 60, 500).astype(np.int32), np.full(400, 0.0002), 14)
    result = length_matched_coverage(generated, pool, np.ones(400, dtype=np.bool_), delta=0.0, rng=rng)
    assert result.comparison.observed > result.comparison.q95


def test_rows_without_a_partner_are_left_out_on_both_sides_and_counted() -> None:
    generated = table(np.eye(5), np.array([10, 10, 10, 500, 0], dtype=np.int32))
    pool = table(np.eye(5)[:2], 10)
    result = length_matched_coverage(
        generated, pool, np.ones(5, dtype=np.bool_), delta=0.0, rng=np.random.default_rng(15)
    )
    assert (result.n_rows, result.n_unmatched) == (2, 3)
    # Two of the three equally long rows, each with a feature of its own, and never the same one twice.
    assert set(result.generated) == set(result.pool) == {2 / 5}
    assert (result.tokens_generated, result.tokens_pool) == (20, 20)


def test_lengths_that_never_meet_are_an_error() -> None:
    with pytest.raises(ConfigError, match="No generated row is as long"):
        length_matched_coverage(
            table(np.eye(3), 5),
            table(np.eye(3), 50),
            np.ones(3, dtype=np.bool_),
            delta=0.0,
            rng=np.random.default_rng(0),
        )
