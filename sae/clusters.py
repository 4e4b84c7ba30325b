"""The dense-space control: each row fires exactly one "feature", the nearest cluster of mean-pooled hidden states.

If coverage in a learned feature space means more than diversity, it has to beat coverage of such clusters (the space
ablation of arXiv 2602.10388, table 12).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations

if TYPE_CHECKING:
    from headwater.sae.extract import TokenBatch

MAX_ITERATIONS = 100
"""Lloyd's steps; a run ends earlier once no row changes its cluster."""

ROWS_PER_BLOCK = 1 << 14
"""Rows compared with all clusters together, which bounds the memory."""

SAME_DISTANCE = 1e-6
"""Squared distance of directions, below which float32 can't tell them apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Directions from the anchor's mean. Hidden states share a large common part, so they are centred first: without
    that, all cosines lie close to 1."""

    mean: NDArray[np.float32]
    """Shape (d,), of the anchor's pooled states."""
    centroids: NDArray[np.float32]
    """Shape (k, d), of length 1."""

    def assign(self, pooled: NDArray[np.float32], n_tokens: NDArray[np.int32]) -> Activations:
        """One entry per row: the nearest cluster with the value (1 + cosine) / 2, in [0, 1].

        `pooled` has shape (rows, d), see `mean_pooled`. The whole row makes the value, so its last token counts as
        the peak. A row without tokens fires nothing.
        """
        self._check(pooled)
        nearest, cosine = _nearest(_directions(pooled, self.mean), self.centroids)
        rows = np.flatnonzero(n_tokens > 0)
        return Activations(
            indptr=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(n_tokens > 0, dtype=np.int64)]),
            features=nearest[rows].astype(np.int32),
            values=((1 + np.clip(cosine[rows], -1, 1)) / 2).astype(np.float32),
            positions=(n_tokens[rows] - 1).astype(np.int32),
            n_tokens=n_tokens.astype(np.int32, copy=False),
            width=len(self.centroids),
        )

    def save(self, folder: Path) -> None:
        """Write `mean.npy` and `centroids.npy`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "mean.npy", self.mean, allow_pickle=False)
        np.save(folder / "centroids.npy", self.centroids, allow_pickle=False)

    def _check(self, pooled: NDArray[np.float32]) -> None:
        if pooled.ndim != 2 or pooled.shape[1] != len(self.mean):
            raise ConfigError(
                f"Pooled hidden states have shape {pooled.shape}; these clusters need (rows, {len(self.mean)}).",
                todo="Use the model and layer that the clusters were made from.",
            )


def load_clusters(folder: Path) -> Clusters:
    """Read what `Clusters.save` wrote. Raises ConfigError when files are missing or don't fit one another."""
    try:
        mean, centroids = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("mean", "centroids"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no clusters: {error}.", todo="Fit them again.") from error
    if mean.ndim != 1 or centroids.shape[1:] != mean.shape:
        raise ConfigError(
            f"{folder} has centroids of shape {centroids.shape} and a mean of shape {mean.shape}.",
            todo="Fit the clusters again.",
        )
    return Clusters(mean, centroids)


def fit_clusters(pooled: NDArray[np.float32], k: int, *, rng: np.random.Generator) -> Clusters:
    """Spherical k-means (Dhillon and Modha, 2001) of shape (rows, d), seeded by k-means++ (Arthur, Vassilvitskii 2007).

    Rows are centred and scaled to length 1, so nearness is the cosine. A cluster that loses all its rows restarts at
    the row that lies furthest from its own cluster. Leave out rows without tokens. Raises ConfigError when there are
    fewer distinct rows than `k`.
    """
    if k < 1:
        raise ConfigError(f"{k} clusters were asked for.", todo="Use at least 1.")
    mean = pooled.mean(axis=0, dtype=np.float64).astype(np.float32)
    directions = _directions(pooled, mean)
    centroids = _plus_plus(directions, k, rng)
    assigned = np.full(len(directions), -1)
    for _ in range(MAX_ITERATIONS):
        nearest, cosine = _nearest(directions, centroids)
        if np.array_equal(nearest, assigned):
            break
        assigned = nearest
        centroids = _recentred(directions, nearest, cosine, k)
    return Clusters(mean, centroids)


def mean_pooled(batches: Iterable[TokenBatch], n_rows: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Mean hidden state over each row's own tokens: shapes (n_rows, d) and, token counts, (n_rows,).

    Every row must come up in one of the batches. A row without own tokens gets zeros and the count 0.
    """
    pooled: NDArray[np.float32] | None = None
    n_tokens = np.full(n_rows, -1, dtype=np.int32)
    for batch in batches:
        counts = batch.own.sum(dim=1)
        own_states = batch.hidden.float().masked_fill(~batch.own.unsqueeze(-1), 0.0)
        means = own_states.sum(dim=1) / counts.clamp(min=1).unsqueeze(-1)
        if pooled is None:
            pooled = np.zeros((n_rows, means.shape[1]), dtype=np.float32)
        pooled[list(batch.rows)] = means.cpu().numpy()
        n_tokens[list(batch.rows)] = counts.cpu().numpy()
    if pooled is None or (n_tokens < 0).any():
        raise ConfigError(
            f"Row {int(np.argmax(n_tokens < 0))} of {n_rows} has no hidden states.",
            todo="Stream the hidden states of all rows.",
        )
    return pooled, n_tokens


def _directions(pooled: NDArray[np.float32], mean: NDArray[np.float32]) -> NDArray[np.float32]:
    centred = pooled.astype(np.float32, copy=False) - mean
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(length, np.finfo(np.float32).tiny), dtype=np.float32)


def _nearest(
    directions: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    nearest = np.empty(len(directions), dtype=np.int64)
    cosine = np.empty(len(directions), dtype=np.float32)
    for start in range(0, len(directions), ROWS_PER_BLOCK):
        block = slice(start, start + ROWS_PER_BLOCK)
        similarity = directions[block] @ centroids.T
        nearest[block] = similarity.argmax(axis=1)
        cosine[block] = similarity.max(axis=1)
    return nearest, cosine


def _plus_plus(directions: NDArray[np.float32], k: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Each next start is drawn with a chance proportional to its squared distance from the nearest start so far."""
    chosen = [int(rng.integers(len(directions)))]
    distance = np.full(len(directions), np.inf)
    while len(chosen) < k:
        # |a - b|² = 2 - 2 a·b for vectors of length 1.
        distance = np.minimum(distance, np.maximum(2 - 2 * (directions @ directions[chosen[-1]]), 0.0))
        distance[distance < SAME_DISTANCE] = 0
        if not distance.any():
            raise ConfigError(f"{len(chosen)} distinct rows can't form {k} clusters.", todo="Ask for fewer clusters.")
        chosen.append(int(rng.choice(len(directions), p=distance / distance.sum())))
    return directions[chosen]


def _recentred(
    directions: NDArray[np.float32], nearest: NDArray[np.int64], cosine: NDArray[np.float32], k: int
) -> NDArray[np.float32]:
    order = np.argsort(nearest, kind="stable")
    sizes = np.bincount(nearest, minlength=k)
    filled = np.flatnonzero(sizes)
    starts = (np.cumsum(sizes) - sizes)[filled]
    centroids = np.empty((k, directions.shape[1]), dtype=np.float32)
    centroids[filled] = np.add.reduceat(directions[order], starts, axis=0)
    empty = np.flatnonzero(sizes == 0)
    centroids[empty] = directions[np.argsort(cosine, kind="stable")[: len(empty)]]
    return _directions(centroids, np.zeros(directions.shape[1], dtype=np.float32))
