"""Which features a dataset fires: feature activation coverage (FAC), the share of the missing set, the sweep over δ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import ConfigError
from headwater.sae.coverage_table import Activations, check_same_space, concatenate, entry_blocks

__all__ = [
    "Activations",
    "Coverage",
    "FiredBy",
    "Mask",
    "SweepPoint",
    "concatenate",
    "fac",
    "fired",
    "fired_by",
    "missing_coverage",
    "quantile_delta",
    "set_difference_mask",
    "support",
    "sweep",
]

Mask = NDArray[np.bool_]


def support(activations: Activations, delta: float) -> NDArray[np.int64]:
    """Rows that fire each feature, A_i(x) = g_i(x) > δ. Shape (width,)."""
    counts = np.zeros(activations.width, dtype=np.int64)
    for block in entry_blocks(activations.n_entries):
        firing = activations.features[block][activations.values[block] > delta]
        counts += np.bincount(firing, minlength=activations.width)
    return counts


def fired(activations: Activations, delta: float, *, min_support: int = 1) -> Mask:
    """F(D): the features that at least `min_support` rows fire. Shape (width,)."""
    return support(activations, delta) >= min_support


def quantile_delta(values: NDArray[np.float32], q: float) -> float:
    """δ as the q-quantile (0 to 1) of the positive activations, by linear interpolation.

    An absolute δ means nothing across SAEs; a quantile does. Raises ConfigError without a positive value.
    """
    positive = values[values > 0]
    if positive.size == 0:
        raise ConfigError(
            "No feature fires anywhere, so δ has no quantile.",
            todo="Check that the SAE fits the model and layer, and that the rows hold text.",
        )
    return float(np.quantile(positive, q))


@dataclass(frozen=True, slots=True)
class Coverage:
    """FAC of a dataset against the anchor, each a share in [0, 1]; None where F(anchor) is empty."""

    binary: float | None
    """|F(generated) ∩ F(anchor)| / |F(anchor)|."""
    frequency: float | None
    """The same with each feature weighing the share of anchor rows that fire it."""
    magnitude: float | None
    """The same with each feature weighing its mean activation over the anchor rows that fire it."""
    n_anchor: int
    """|F(anchor)|."""
    n_covered: int
    """|F(generated) ∩ F(anchor)|."""


def fac(
    generated: Activations, anchor: Activations, delta: float, *, min_support: int = 1, relevant: Mask | None = None
) -> Coverage:
    """Feature activation coverage (arXiv 2602.10388, §5 and appendix L.6), binary and weighted.

    F(anchor) holds the features that at least `min_support` anchor rows fire and, where a mask of shape (width,) is
    given, that are `relevant`; one row suffices for F(generated). The magnitude weight averages over firing rows only,
    so that it says how strongly a feature fires when it does, not how often.
    """
    check_same_space(generated, anchor)
    rows_firing = support(anchor, delta)
    target = (rows_firing >= min_support) & _or_all(relevant, anchor.width)
    covered = target & fired(generated, delta)
    magnitude = _activation_sums(anchor, delta) / np.maximum(rows_firing, 1)
    return Coverage(
        binary=_share(covered, target, np.ones(anchor.width)),
        frequency=_share(covered, target, rows_firing / max(anchor.n_rows, 1)),
        magnitude=_share(covered, target, magnitude),
        n_anchor=int(target.sum()),
        n_covered=int(covered.sum()),
    )


def missing_coverage(generated: Activations, missing: Mask, delta: float) -> float | None:
    """Share of F_miss (mask of shape (width,)) that at least one generated row fires; None when nothing is missing.

    This, not FAC, is what the tables of arXiv 2602.10388 report.
    """
    return _share(missing & fired(generated, delta), missing, np.ones(generated.width))


@dataclass(frozen=True, slots=True)
class FiredBy:
    """Who fires the features of a set, each a share in [0, 1]; None where there are none to fire."""

    n: int
    """Features of the set."""
    seed: float | None
    """Share that the seed fires. Not 0 when the rate test made the set: rarer is not absent."""
    generated: float | None
    """Share that the generated rows alone fire."""
    both: float | None
    """Share that seed and generated rows fire together."""
    n_never: int
    """Features of the set that no seed row fires."""
    never_generated: float | None
    """Share of those that the generated rows fire."""


def fired_by(features: Mask, seed: Activations, generated: Activations, delta: float) -> FiredBy:
    """What seed and generated rows fire of a mask of shape (width,), one row sufficing."""
    never = features & ~fired(seed, delta)
    return FiredBy(
        n=int(features.sum()),
        seed=missing_coverage(seed, features, delta),
        generated=missing_coverage(generated, features, delta),
        both=missing_coverage(concatenate(seed, generated), features, delta),
        n_never=int(never.sum()),
        never_generated=missing_coverage(generated, never, delta),
    )


def set_difference_mask(anchor: Activations, seed: Activations, delta: float, *, min_support: int) -> Mask:
    """F_miss = F(anchor) with its minimum support, less whatever any seed row fires. Shape (width,)."""
    check_same_space(anchor, seed)
    return fired(anchor, delta, min_support=min_support) & ~fired(seed, delta)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What coverage looks like at one δ."""

    quantile: float
    delta: float
    n_anchor: int
    """|F(anchor)|."""
    n_seed: int
    """|F(seed)|, one row sufficing."""
    n_missing: int
    """|F_miss|."""
    fac_before: float | None
    """Binary FAC of the seed."""
    fac_after: float | None
    """Binary FAC of the seed together with the generated rows."""
    missing_before: float | None
    """Share of F_miss that the seed fires all the same: 0 by set difference, not by the rate test."""
    missing_covered: float | None
    """Share of F_miss that the generated rows fire."""
    missing_after: float | None
    """Share of F_miss that seed and generated rows fire together."""
    n_missing_never: int
    """Features of F_miss that no seed row fires."""
    missing_never_covered: float | None
    """Share of those that the generated rows fire."""


def sweep(
    anchor: Activations,
    seed: Activations,
    generated: Activations,
    quantiles: Sequence[float],
    *,
    min_support: int = 1,
    relevant: Mask | None = None,
    find_missing: Callable[[float], Mask] | None = None,
) -> list[SweepPoint]:
    """Coverage at δ = each quantile of the anchor's positive activations.

    `find_missing` gives F_miss for a δ as a mask of shape (width,); the set difference unless given.
    """
    both = concatenate(seed, generated)
    allowed = _or_all(relevant, anchor.width)
    points = []
    for quantile in quantiles:
        delta = quantile_delta(anchor.values, quantile)
        if find_missing is None:
            missing = set_difference_mask(anchor, seed, delta, min_support=min_support) & allowed
        else:
            missing = find_missing(delta)
        before = fac(seed, anchor, delta, min_support=min_support, relevant=relevant)
        firing = fired_by(missing, seed, generated, delta)
        points.append(
            SweepPoint(
                quantile=quantile,
                delta=delta,
                n_anchor=before.n_anchor,
                n_seed=int((fired(seed, delta) & allowed).sum()),
                n_missing=firing.n,
                fac_before=before.binary,
                fac_after=fac(both, anchor, delta, min_support=min_support, relevant=relevant).binary,
                missing_before=firing.seed,
                missing_covered=firing.generated,
                missing_after=firing.both,
                n_missing_never=firing.n_never,
                missing_never_covered=firing.never_generated,
            )
        )
    return points


def _activation_sums(activations: Activations, delta: float) -> NDArray[np.float64]:
    sums = np.zeros(activations.width)
    for block in entry_blocks(activations.n_entries):
        firing = activations.values[block] > delta
        sums += np.bincount(
            activations.features[block][firing],
            weights=activations.values[block][firing],
            minlength=activations.width,
        )
    return sums


def _or_all(relevant: Mask | None, width: int) -> Mask:
    if relevant is None:
        return np.ones(width, dtype=np.bool_)
    if len(relevant) != width:
        raise ConfigError(
            f"The mask of relevant features has {len(relevant)} entries; the feature space has {width}.",
            todo="Interpret the features of the SAE in use.",
        )
    return relevant


def _share(part: Mask, whole: Mask, weights: NDArray[np.float64]) -> float | None:
    total = float(weights[whole].sum())
    return float(weights[part].sum()) / total if total > 0 else None
