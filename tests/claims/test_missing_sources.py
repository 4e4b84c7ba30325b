"""Claim: missing features belong to what is missing, on four real sources of which one at a time is missing.

Every text is cut to 16 tokens, so that length says nothing. Negative control: equally many random live features in
place of F_miss must not tell the texts apart.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.sae.coverage import Activations, concatenate, fired, quantile_delta
from headwater.sae.missing import rate_test, set_difference
from headwater.sae.nulls import random_feature_auroc
from headwater.tests.claims.conftest import LAYER, RealSpace
from headwater.tests.claims.results import record
from headwater.tests.claims.sources import SOURCES, measure, spread

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

pytestmark = pytest.mark.claim
pytest.importorskip("torch", reason="the extra `local` is not installed")

N_DRAWS = 12
QUANTILES = (0.25, 0.5, 0.7, 0.8, 0.9)
TESTS = {"rate test": rate_test, "set difference": set_difference}
CUT, TEXTS_PER_PART = 16, 125


@dataclass(frozen=True)
class Cut:
    """Real texts of exactly `CUT` tokens: features, and which source each is from."""

    features: Activations
    source: NDArray[np.str_]


@pytest.fixture(scope="module")
def cut(engine: TransformersEngine, real: RealSpace) -> Cut:
    tables, names = [], []
    for source in SOURCES:
        texts = real.held_out[source][: 6 * TEXTS_PER_PART]
        features = measure(engine, texts, LAYER, real.space, max_tokens=CUT).features
        long_enough = np.flatnonzero(features.n_tokens == CUT)[: 3 * TEXTS_PER_PART]
        tables.append(features.take(long_enough))
        names += [source] * len(long_enough)
    features = tables[0]
    for table in tables[1:]:
        features = concatenate(features, table)
    return Cut(features, np.array(names))


def test_texts_of_a_missing_real_source_fire_the_missing_features(cut: Cut, real: RealSpace) -> None:
    found: dict[tuple[str, float, str], list[tuple[float, float, int]]] = defaultdict(list)
    for draw in range(N_DRAWS):
        rng = np.random.default_rng(draw)
        part = np.empty(len(cut.source), dtype="<U6")
        for source in SOURCES:
            own = rng.permutation(np.flatnonzero(cut.source == source))
            for name, rows in zip(("anchor", "seed", "fresh"), np.array_split(own, 3), strict=True):
                part[rows] = name
        for missing_source in SOURCES:
            anchor = cut.features.take(np.flatnonzero(part == "anchor"))
            seed = cut.features.take(np.flatnonzero((part == "seed") & (cut.source != missing_source)))
            fresh = np.flatnonzero(part == "fresh")
            told, is_missing = cut.features.take(fresh), cut.source[fresh] == missing_source
            for name, find in TESTS.items():
                for quantile in QUANTILES:
                    delta = quantile_delta(anchor.values, quantile)
                    missing = find(anchor, seed, delta, min_support=3).mask
                    if not missing.any():
                        continue
                    live = fired(anchor, delta) | fired(seed, delta)
                    result = random_feature_auroc(told, is_missing, missing, delta=delta, rng=rng, live=live)
                    found[name, quantile, missing_source].append((result.observed, result.mean, int(missing.sum())))
    table: list[list[Any]] = []
    for (name, quantile, source), draws in found.items():
        observed, nulls, sizes = zip(*draws, strict=True)
        table.append(
            [name, quantile, source, spread(observed), float(np.mean(nulls)), float(np.mean(sizes)), len(draws)]
        )
    counts = {source: int((cut.source == source).sum()) for source in SOURCES}
    record(
        "Missing features belong to what is missing (four real sources, one left out)",
        f"{real}. Every text is cut to its first {CUT} tokens, so length alone is exactly 0.5. Texts: {counts}, drawn "
        f"{N_DRAWS} times into thirds: anchor, seed (without the missing source), fresh. Minimum support 3.",
        ("test", "δ quantile", "missing source", "AUROC ± sd over draws", "null", "missing", "draws"),
        sorted(table, key=lambda row: tuple(map(str, row[:3]))),
        "A draw in which nothing was missing is left out.",
    )
    for name, quantile in (("rate test", 0.5), ("rate test", 0.8), ("set difference", 0.8)):
        means = [np.mean([draw[0] for draw in found[name, quantile, source]]) for source in SOURCES]
        chance = [np.mean([draw[1] for draw in found[name, quantile, source]]) for source in SOURCES]
        assert np.mean(means) > np.mean(chance) + 0.2, (name, quantile, means, chance)
        assert abs(np.mean(chance) - 0.5) < 0.1
