"""The dense control: k-means against scikit-learn's, and its activations in the same shape as an SAE's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from headwater.core.errors import ConfigError
from headwater.sae.clusters import Clusters, fit_clusters, load_clusters, mean_pooled
from headwater.sae.coverage import Activations, fac, fired
from headwater.sae.missing import set_difference

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="pooling hidden states needs the `local` extra")


def blobs(seed: int, k: int = 6, per_blob: int = 30) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Rows around k directions, with the large common offset that hidden states have."""
    rng = np.random.default_rng(seed)
    kinds = np.repeat(np.arange(k), per_blob)
    centres = rng.normal(size=(k, 24))
    return (50 + 3 * centres[kinds] + rng.normal(scale=0.4, size=(len(kinds), 24))).astype(np.float32), kinds


def tokens(rows: int) -> NDArray[np.int32]:
    return np.full(rows, 7, dtype=np.int32)


@pytest.mark.parametrize("seed", range(4))
def test_well_separated_kinds_are_found(seed: int) -> None:
    rows, kinds = blobs(seed)
    clusters = fit_clusters(rows, 6, rng=np.random.default_rng(seed))
    assert adjusted_rand_score(kinds, clusters.assign(rows, tokens(len(rows))).features) > 0.8


def test_the_fit_is_as_tight_as_scikit_learns() -> None:
    rows = np.random.default_rng(5).normal(size=(500, 16)).astype(np.float32)
    clusters = fit_clusters(rows, 20, rng=np.random.default_rng(6))
    directions = rows - rows.mean(axis=0)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    reference = KMeans(20, n_init=1, random_state=0).fit(directions).cluster_centers_
    reference /= np.linalg.norm(reference, axis=1, keepdims=True)

    ours = (2 * clusters.assign(rows, tokens(500)).values - 1).mean()

    assert ours == pytest.approx((directions @ reference.T).max(axis=1).mean(), rel=0.03)


def test_no_row_prefers_another_centroid_and_centroids_are_the_means_of_their_rows() -> None:
    rows, _ = blobs(7)
    clusters = fit_clusters(rows, 6, rng=np.random.default_rng(8))
    nearest = clusters.assign(rows, tokens(len(rows))).features
    directions = rows - rows.mean(axis=0)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    for cluster in range(6):
        mean = directions[nearest == cluster].mean(axis=0)
        np.testing.assert_allclose(clusters.centroids[cluster], mean / np.linalg.norm(mean), atol=1e-4)


def test_a_row_fires_its_nearest_cluster_with_a_value_by_hand() -> None:
    clusters = Clusters(np.array([1, 1], dtype=np.float32), np.array([[1, 0], [0, 1]], dtype=np.float32))
    rows = np.array([[4, 1], [1, 9], [4, 5], [1, -2], [1, 1]], dtype=np.float32)
    counts = np.array([3, 1, 2, 4, 0], dtype=np.int32)

    activations = clusters.assign(rows, counts)

    assert activations.features.tolist() == [0, 1, 1, 0]
    assert activations.values.tolist() == pytest.approx([1.0, 1.0, (1 + 0.8) / 2, 0.5])
    assert activations.positions.tolist() == [2, 0, 1, 3]
    assert activations.indptr.tolist() == [0, 1, 2, 3, 4, 4]
    assert activations.width == 2


def test_coverage_and_missing_work_on_clusters_unchanged() -> None:
    rows, kinds = blobs(9)
    clusters = fit_clusters(rows, 6, rng=np.random.default_rng(9))

    def part(mask: NDArray[np.bool_]) -> Activations:
        return clusters.assign(rows[mask], tokens(int(mask.sum())))

    anchor, seed, generated = part(kinds >= 0), part(kinds < 2), part(kinds == 4)
    missing = set_difference(anchor, seed, 0.0)
    seed_clusters = int(fired(seed, 0.0).sum())
    assert fac(seed, anchor, 0.0).binary == pytest.approx(seed_clusters / 6)
    assert len(missing) == 6 - seed_clusters
    assert 0 < (fired(generated, 0.0) & missing.mask).sum() < len(missing)


def test_the_same_seed_gives_the_same_clusters_and_rows_in_blocks_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, _ = blobs(10)
    first = fit_clusters(rows, 6, rng=np.random.default_rng(1))
    assert np.array_equal(first.centroids, fit_clusters(rows, 6, rng=np.random.default_rng(1)).centroids)
    whole = first.assign(rows, tokens(len(rows)))
    monkeypatch.setattr("headwater.sae.clusters.ROWS_PER_BLOCK", 17)
    assert np.array_equal(first.assign(rows, tokens(len(rows))).features, whole.features)


def test_as_many_clusters_as_rows_leave_none_empty() -> None:
    rows = np.random.default_rng(11).normal(size=(12, 5)).astype(np.float32)
    activations = fit_clusters(rows, 12, rng=np.random.default_rng(2)).assign(rows, tokens(12))
    assert sorted(activations.features.tolist()) == list(range(12))


def test_an_emptied_cluster_restarts_at_the_row_furthest_from_its_own() -> None:
    from headwater.sae.clusters import _recentred

    directions = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
    cosine = np.array([1.0, 0.8, 0.0], dtype=np.float32)
    centroids = _recentred(directions, np.array([0, 0, 0]), cosine, 2)
    assert centroids[1].tolist() == [0, 1]
    np.testing.assert_allclose(centroids[0], np.array([1.8, 1.6]) / np.hypot(1.8, 1.6), rtol=1e-6)


def test_too_few_distinct_rows_are_an_error() -> None:
    rows = np.repeat(np.random.default_rng(12).normal(size=(3, 8)), 10, axis=0).astype(np.float32)
    with pytest.raises(ConfigError, match="3 distinct rows can't form 4 clusters"):
        fit_clusters(rows, 4, rng=np.random.default_rng(3))


def test_clusters_survive_the_disk(tmp_path: Path) -> None:
    rows, _ = blobs(13)
    clusters = fit_clusters(rows, 6, rng=np.random.default_rng(4))
    clusters.save(tmp_path / "clusters")
    loaded = load_clusters(tmp_path / "clusters")
    assert np.array_equal(loaded.mean, clusters.mean)
    assert np.array_equal(loaded.centroids, clusters.centroids)


def test_a_folder_without_clusters_or_with_pickled_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no clusters"):
        load_clusters(tmp_path)
    for name in ("mean", "centroids"):
        np.save(tmp_path / f"{name}.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="holds no clusters"):
        load_clusters(tmp_path)


def test_states_of_another_width_are_refused() -> None:
    clusters = Clusters(np.zeros(4, dtype=np.float32), np.eye(4, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"shape \(2, 3\).*\(rows, 4\)"):
        clusters.assign(np.zeros((2, 3), dtype=np.float32), tokens(2))


@dataclass
class Batch:
    rows: list[int]
    hidden: Tensor
    own: Tensor


def test_pooling_averages_own_tokens_alone_in_any_row_order() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [float("nan"), 99.0]], [[5.0, 6.0], [7.0, 7.0], [9.0, 8.0]]])
    own = torch.tensor([[True, True, False], [True, False, True]])
    nothing = Batch([1], torch.ones(1, 1, 2), torch.tensor([[False]]))

    pooled, n_tokens = mean_pooled([Batch([2, 0], hidden, own), nothing], 3)

    assert pooled.tolist() == [[7.0, 7.0], [0.0, 0.0], [2.0, 3.0]]
    assert n_tokens.tolist() == [2, 0, 2]


def test_a_row_that_never_comes_is_named() -> None:
    with pytest.raises(ConfigError, match="Row 1 of 2"):
        mean_pooled([Batch([0], torch.ones(1, 1, 2), torch.tensor([[True]]))], 2)
