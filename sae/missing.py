"""What the seed lacks: missing features by set difference or by a test of firing rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations, Mask, support
from headwater.sae.coverage_table import check_same_space, entry_blocks

if TYPE_CHECKING:
    import polars as pl

SIZE_RATIO_TO_WARN = 2.0
"""Anchor and seed that differ more than this, in rows or in tokens, make the set difference doubtful."""

Method = Literal["set_difference", "rate_test"]


@dataclass(frozen=True, slots=True, eq=False)
class MissingFeatures:
    """F_miss, ascending by feature; every array has shape (missing features,)."""

    features: NDArray[np.int32]
    anchor_support: NDArray[np.int64]
    """Anchor rows that fire the feature."""
    seed_support: NDArray[np.int64]
    p_value: NDArray[np.float64]
    """How likely so large a surplus in the anchor is when both datasets fire the feature at one rate."""
    anchor_max: NDArray[np.float32]
    """Largest activation in the anchor."""
    peak_row: NDArray[np.int64]
    """Anchor row of that activation, the first on ties."""
    peak_position: NDArray[np.int32]
    """Own token of that row at which it peaks."""
    n_tested: int
    """Features that could have been missing: relevant, with the minimum support in the anchor."""
    width: int
    method: Method
    delta: float
    warnings: tuple[str, ...]
    """Plain sentences for the report."""

    def __len__(self) -> int:
        return len(self.features)

    @property
    def mask(self) -> Mask:
        """Shape (width,)."""
        mask = np.zeros(self.width, dtype=np.bool_)
        mask[self.features] = True
        return mask

    def to_frame(self) -> pl.DataFrame:
        """One row per missing feature, columns named as the arrays here."""
        import polars as pl

        columns = ("anchor_support", "seed_support", "p_value", "anchor_max", "peak_row", "peak_position")
        return pl.DataFrame({"feature": self.features} | {name: getattr(self, name) for name in columns})


def set_difference(
    anchor: Activations, seed: Activations, delta: float, *, min_support: int = 2, relevant: Mask | None = None
) -> MissingFeatures:
    """F(anchor) \\ F(seed): at least `min_support` anchor rows fire the feature and no seed row does.

    Asks whether the seed ever fires a feature, so it depends on how many chances the seed had: `warnings` says when
    the sizes make that doubtful. The rate test is the sounder choice then.
    """
    candidates = _Candidates.of(anchor, seed, delta, min_support, relevant)
    keep = candidates.seed_support == 0
    warnings = _size_warnings(anchor, seed, candidates.p_value[keep])
    return _describe(candidates, keep, anchor, method="set_difference", delta=delta, warnings=warnings)


def rate_test(
    anchor: Activations,
    seed: Activations,
    delta: float,
    *,
    alpha: float = 0.05,
    min_support: int = 2,
    relevant: Mask | None = None,
    control_false_discoveries: bool = False,
) -> MissingFeatures:
    """Features that a larger share of anchor rows than of seed rows fires, by Fisher's exact one-sided test.

    `alpha` bounds each p-value, and `warnings` says how many features that lets through by chance at most. With
    `control_false_discoveries` the p-values of all features tested (those with the minimum support, relevant where a
    mask is given) go through Benjamini and Hochberg's step-up procedure (1995), and `alpha` bounds the expected share
    of false finds instead. That takes many rows: with 336 anchor rows and 128 seed rows, a feature that fires in all
    14 rows of one missing kind and nowhere else has p = 0.01, which never survives among 2,000 features.

    Rows, not tokens, are counted: when anchor rows are longer, features of mere length are found too, so compare with
    the length-matched null. The test takes the datasets for independent; seed rows that are also in the anchor make
    it cautious.
    """
    if not 0 < alpha < 0.5:
        raise ConfigError(f"alpha is {alpha}.", todo="Choose a level between 0 and 0.5, such as 0.05.")
    candidates = _Candidates.of(anchor, seed, delta, min_support, relevant)
    below = candidates.p_value <= alpha
    keep = benjamini_hochberg(candidates.p_value) <= alpha if control_false_discoveries else below
    warnings = _chance_warnings(keep, below, alpha)
    return _describe(candidates, keep, anchor, method="rate_test", delta=delta, warnings=warnings)


def fisher_one_sided(
    anchor_support: NDArray[np.int64], seed_support: NDArray[np.int64], n_anchor: int, n_seed: int
) -> NDArray[np.float64]:
    """P(at least this many of the firing rows are anchor rows), given how many rows fire in all.

    Under one common rate the anchor's share of the k firing rows is hypergeometric whatever that rate is (Fisher,
    1935). A binomial test against the seed's observed rate would take that rate for known: a feature never seen in
    20 seed rows would get p = 0. All arrays have one shape; rows are counted in `n_anchor` and `n_seed`. The relative
    error stays below 1e-7 for up to a million rows.
    """
    pairs, inverse = np.unique(np.stack([anchor_support, seed_support]), axis=1, return_inverse=True)
    return _upper_tail(pairs[0], pairs[0] + pairs[1], n_anchor, n_seed)[inverse.reshape(-1)]


def benjamini_hochberg(p_value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Adjusted p-values: those at most q hold a share of at most q of false finds, in expectation. Shape as given."""
    n = len(p_value)
    order = np.argsort(p_value, kind="stable")
    scaled = p_value[order] * n / np.arange(1, n + 1)
    adjusted = np.empty(n)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """The features that could be missing: relevant, with enough support in the anchor."""

    features: NDArray[np.int32]
    anchor_support: NDArray[np.int64]
    seed_support: NDArray[np.int64]
    p_value: NDArray[np.float64]

    @classmethod
    def of(
        cls, anchor: Activations, seed: Activations, delta: float, min_support: int, relevant: Mask | None
    ) -> _Candidates:
        check_same_space(anchor, seed)
        if min_support < 1:
            raise ConfigError(f"min_support is {min_support}.", todo="A feature needs at least one anchor row: use 1.")
        in_anchor, in_seed = support(anchor, delta), support(seed, delta)
        mask = in_anchor >= min_support
        features = np.flatnonzero(mask if relevant is None else mask & relevant).astype(np.int32)
        counts = in_anchor[features], in_seed[features]
        return cls(features, *counts, fisher_one_sided(*counts, anchor.n_rows, seed.n_rows))


def _describe(
    candidates: _Candidates,
    keep: Mask,
    anchor: Activations,
    *,
    method: Method,
    delta: float,
    warnings: tuple[str, ...],
) -> MissingFeatures:
    features = candidates.features[keep]
    peaks = _peak_entries(anchor, features)
    return MissingFeatures(
        features=features,
        anchor_support=candidates.anchor_support[keep],
        seed_support=candidates.seed_support[keep],
        p_value=candidates.p_value[keep],
        anchor_max=anchor.values[peaks],
        peak_row=anchor.rows_of(peaks),
        peak_position=anchor.positions[peaks],
        n_tested=len(candidates.features),
        width=anchor.width,
        method=method,
        delta=delta,
        warnings=warnings,
    )


def _peak_entries(anchor: Activations, features: NDArray[np.int32]) -> NDArray[np.int64]:
    """The entry with each feature's largest value; every feature must occur."""
    largest = np.full(anchor.width, -np.inf, dtype=np.float32)
    for block in entry_blocks(anchor.n_entries):
        np.maximum.at(largest, anchor.features[block], anchor.values[block])
    entry = np.full(anchor.width, anchor.n_entries, dtype=np.int64)
    for block in entry_blocks(anchor.n_entries):
        at_peak = np.flatnonzero(anchor.values[block] == largest[anchor.features[block]])
        np.minimum.at(entry, anchor.features[block][at_peak], at_peak + block.start)
    return entry[features]


def _size_warnings(anchor: Activations, seed: Activations, p_value: NDArray[np.float64]) -> tuple[str, ...]:
    for unit, a, b in (
        ("rows", anchor.n_rows, seed.n_rows),
        ("tokens", int(anchor.n_tokens.sum()), int(seed.n_tokens.sum())),
    ):
        if max(a, b) > SIZE_RATIO_TO_WARN * min(a, b):
            chance = int((p_value > 0.05).sum())
            return (
                f"The anchor has {a} {unit} and the seed {b}, so the set difference partly measures size: {chance} of "
                f"{len(p_value)} missing features could be absent from the seed by chance (p > 0.05). Prefer the rate "
                "test.",
            )
    return ()


def _chance_warnings(keep: Mask, below: Mask, alpha: float) -> tuple[str, ...]:
    tested, found, uncorrected = len(keep), int(keep.sum()), int(below.sum())
    if found < uncorrected:
        return (
            f"{found} of {tested} features tested pass the rate test after the correction for false discoveries, "
            f"{uncorrected} before it. With few rows the correction leaves out features that are truly rarer.",
        )
    if found:
        return (
            f"{tested} features were tested at p <= {alpha}: chance alone passes up to {alpha * tested:.0f} on "
            f"average, and {found} were found. The random-feature null shows what they are worth.",
        )
    return ()


def _upper_tail(
    observed: NDArray[np.int64], firing: NDArray[np.int64], n_anchor: int, n_seed: int
) -> NDArray[np.float64]:
    """P(X >= observed), X hypergeometric: `firing` rows drawn from n_anchor + n_seed rows.

    Sums away from the mode, where each term is smaller than the last: the upper tail when the anchor has more than
    its part, else one less the lower tail.
    """
    above = observed * (n_anchor + n_seed) > firing * n_anchor
    start = np.where(above, observed, observed - 1)
    step = np.where(above, 1, -1)
    low, high = np.maximum(firing - n_seed, 0), np.minimum(firing, n_anchor)
    inside = (start >= low) & (start <= high)
    total = np.zeros(len(observed))
    total[inside] = _tail_sum(start[inside], firing[inside], step[inside], n_anchor, n_seed)
    return np.clip(np.where(above, total, 1.0 - total), 0.0, 1.0)


def _tail_sum(
    start: NDArray[np.int64], firing: NDArray[np.int64], step: NDArray[np.int64], n_anchor: int, n_seed: int
) -> NDArray[np.float64]:
    x, k, up = start.astype(np.float64), firing.astype(np.float64), step > 0
    log_first = _log_choose(n_anchor, x) + _log_choose(n_seed, k - x) - _log_choose(n_anchor + n_seed, k)
    # Terms relative to the first: a tail far out would underflow as a plain probability before it is summed.
    total, term = np.ones(len(x)), np.ones(len(x))
    live = np.arange(len(x))
    while live.size:
        xs, ks = x[live], k[live]
        rise = (n_anchor - xs) * (ks - xs) / ((xs + 1) * (n_seed - ks + xs + 1))
        fall = xs * (n_seed - ks + xs) / ((n_anchor - xs + 1) * (ks - xs + 1))
        term[live] *= np.where(up[live], rise, fall)
        total[live] += term[live]
        x[live] += step[live]
        live = live[term[live] > total[live] * np.finfo(np.float64).eps]
    return np.exp(log_first + np.log(total))


def _log_choose(n: int, k: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-np.log(n + 1.0) - betaln(n - k + 1.0, k + 1.0), dtype=np.float64)
