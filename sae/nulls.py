"""What chance and text length would give, beside which every coverage number has to stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import rankdata

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations, Mask, fired
from headwater.sae.coverage_table import check_same_space

MIN_DRAWS = 15
"""Single random draws scatter so widely that fewer say little."""

LENGTH_RATIO = 1.25
"""Rows count as equally long when the longer has less than this many times the tokens of the shorter."""

ROWS_PER_BLOCK = 1 << 16
"""Rows scored together, which bounds the memory of a pass over a large table."""

Denominator = Literal["token", "live"]


@dataclass(frozen=True, slots=True)
class NullComparison:
    """A measured number beside what the null gives."""

    observed: float
    draws: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.draws))

    @property
    def q95(self) -> float:
        """The 95 % quantile of the draws: what an observed number has to pass."""
        return float(np.quantile(self.draws, 0.95))


def auroc(scores: NDArray[np.float64], positive: Mask) -> float:
    """P(a positive row scores above a negative one), ties counting half: the Mann-Whitney statistic.

    Both arrays have shape (rows,). Raises ConfigError unless there are rows of both kinds.
    """
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise ConfigError(
            f"An AUROC needs rows of both kinds; there are {n_positive} positive and {n_negative} negative ones.",
            todo="Check which rows are marked as belonging to the missing kinds.",
        )
    rank_sum = float(rankdata(scores)[positive].sum())
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def firing_score(activations: Activations, features: Mask, delta: float, *, per: Denominator) -> NDArray[np.float64]:
    """How many of `features` each row fires, per own token or per feature that the row fires at all. Shape (rows,)."""
    return _scores(activations, features[:, None], delta, per)[:, 0]


def random_feature_auroc(
    activations: Activations,
    positive: Mask,
    missing: Mask,
    *,
    delta: float,
    rng: np.random.Generator,
    per: Denominator = "token",
    live: Mask | None = None,
    n_draws: int = 20,
) -> NullComparison:
    """AUROC of "fires F_miss" for the `positive` rows against the others, beside equally many random live features.

    Random features come from *all* live ones, the missing included: a null drawn from what isn't missing lies below
    0.5 by construction. `live` has shape (width,) and should hold what fires anywhere in anchor or seed; without it,
    what fires in `activations`.
    """
    live = fired(activations, delta) if live is None else live
    indicators = np.column_stack([missing, _random_masks(missing, live, n_draws, rng)])
    scores = _scores(activations, indicators, delta, per)
    observed, *draws = (auroc(scores[:, column], positive) for column in range(scores.shape[1]))
    return NullComparison(observed, tuple(draws))


def random_feature_coverage(
    generated: Activations,
    missing: Mask,
    live: Mask,
    *,
    delta: float,
    rng: np.random.Generator,
    n_draws: int = 20,
) -> NullComparison:
    """Share of F_miss that the generated rows fire, beside the share of equally many random live features."""
    hit = fired(generated, delta)
    masks = _random_masks(missing, live, n_draws, rng)
    return NullComparison(float(hit[missing].mean()), tuple(float(hit[mask].mean()) for mask in masks.T))


@dataclass(frozen=True, slots=True)
class LengthMatched:
    """Coverage of generated rows and of rows of a pool that are as many and as long."""

    generated: tuple[float, ...]
    """Share of the features that the matched generated rows fire, per draw."""
    pool: tuple[float, ...]
    """The same for the pool's rows."""
    n_rows: int
    """Rows on each side of every draw."""
    n_unmatched: int
    """Generated rows left out of both sides: the pool has too few of their length."""
    tokens_generated: float
    """Mean total tokens per draw: how well the lengths match."""
    tokens_pool: float

    @property
    def comparison(self) -> NullComparison:
        """The generated rows' mean over the draws, beside the pool's draws."""
        return NullComparison(float(np.mean(self.generated)), self.pool)


def length_matched_coverage(
    generated: Activations,
    pool: Activations,
    features: Mask,
    *,
    delta: float,
    rng: np.random.Generator,
    n_draws: int = 20,
) -> LengthMatched:
    """Share of `features` fired by the generated rows beside that fired by pool rows of the same number and lengths.

    Longer texts and more texts fire more features, so both are held: rows fall into strata of token counts (edges
    grow by LENGTH_RATIO), and every draw takes from each stratum the same number of rows on both sides, without
    replacement, because a repeated row would add nothing and flatter the generated side.

    The pool decides what is asked. Rows of the anchor ask whether generated text covers the features as well as real
    text that has them. Seed rows fire no feature of a set difference by definition: with them the null is 0 and says
    nothing; they serve for the rate test or for F(anchor). Raises ConfigError when no length occurs on both sides.
    """
    check_same_space(generated, pool)
    _check_draws(n_draws)
    _check_missing(features)
    quotas = _quotas(_length_strata(generated), _length_strata(pool))
    n_rows = sum(quotas.values())
    if not n_rows:
        raise ConfigError(
            "No generated row is as long as a row of the comparison pool.",
            todo="Compare with a pool whose texts have lengths like the generated ones.",
        )
    (own, own_tokens), (other, other_tokens) = (
        _matched_shares(table, features, delta, quotas=quotas, n_draws=n_draws, rng=rng) for table in (generated, pool)
    )
    return LengthMatched(own, other, n_rows, generated.n_rows - n_rows, own_tokens, other_tokens)


def _scores(
    activations: Activations, indicators: NDArray[np.bool_], delta: float, per: Denominator
) -> NDArray[np.float64]:
    """Shape (rows, columns of `indicators`), which has shape (width, columns)."""
    weights = np.column_stack([indicators, np.ones(activations.width)]).astype(np.float32)
    counts = np.empty((activations.n_rows, weights.shape[1]), dtype=np.float32)
    for start in range(0, activations.n_rows, ROWS_PER_BLOCK):
        bounds = activations.indptr[start : start + ROWS_PER_BLOCK + 1]
        entries = slice(bounds[0], bounds[-1])
        firing = (activations.values[entries] > delta).astype(np.float32)
        shape = (len(bounds) - 1, activations.width)
        counts[start : start + shape[0]] = (
            csr_array((firing, activations.features[entries], bounds - bounds[0]), shape=shape) @ weights
        )
    denominator = activations.n_tokens if per == "token" else counts[:, -1]
    return np.asarray(counts[:, :-1] / np.maximum(denominator, 1.0)[:, None], dtype=np.float64)


def _random_masks(missing: Mask, live: Mask, n_draws: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Shape (width, n_draws): each column marks as many live features as there are missing ones."""
    _check_draws(n_draws)
    _check_missing(missing)
    candidates, n_missing = np.flatnonzero(live), int(missing.sum())
    if n_missing >= len(candidates):
        raise ConfigError(
            f"{n_missing} features are missing and {len(candidates)} are live, so a random draw is no comparison.",
            todo="Count as live every feature that anchor or seed fires, and raise the minimum support or δ.",
        )
    masks = np.zeros((len(live), n_draws), dtype=np.bool_)
    for column in range(n_draws):
        masks[rng.choice(candidates, n_missing, replace=False), column] = True
    return masks


def _check_draws(n_draws: int) -> None:
    if n_draws < MIN_DRAWS:
        raise ConfigError(f"{n_draws} draws are too few for a null.", todo=f"Use at least {MIN_DRAWS}.")


def _check_missing(features: Mask) -> None:
    if not features.any():
        raise ConfigError("No feature is missing, so there is nothing to compare.", todo="Skip the null.")


def _length_strata(table: Activations) -> NDArray[np.int64]:
    """The stratum of each row; rows without tokens have one of their own."""
    logs = np.floor(np.log(np.maximum(table.n_tokens, 1)) / np.log(LENGTH_RATIO))
    return np.where(table.n_tokens > 0, logs, -1).astype(np.int64)


def _quotas(first: NDArray[np.int64], second: NDArray[np.int64]) -> dict[int, int]:
    strata = np.intersect1d(first, second)
    return {int(s): min(int((first == s).sum()), int((second == s).sum())) for s in strata}


def _matched_shares(
    table: Activations, features: Mask, delta: float, *, quotas: dict[int, int], n_draws: int, rng: np.random.Generator
) -> tuple[tuple[float, ...], float]:
    """The share of `features` that each draw fires, and the mean number of tokens in a draw."""
    strata = _length_strata(table)
    shares, tokens = [], 0
    for _ in range(n_draws):
        part = table.take(_draw_rows(strata, quotas, rng))
        shares.append(float(fired(part, delta)[features].mean()))
        tokens += int(part.n_tokens.sum())
    return tuple(shares), tokens / n_draws


def _draw_rows(strata: NDArray[np.int64], quotas: dict[int, int], rng: np.random.Generator) -> NDArray[np.int64]:
    parts = [rng.choice(np.flatnonzero(strata == s), quota, replace=False) for s, quota in quotas.items()]
    return np.sort(np.concatenate(parts))
