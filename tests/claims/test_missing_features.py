"""Claim: missing features belong to what is missing. Rows of kinds that the seed lacks fire F_miss, others do not.

Negative control: equally many random live features in place of F_miss must not tell the rows apart. Length alone is
reported beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.llm.types import Message
from headwater.sae.config import SaeTrainConfig
from headwater.sae.coverage import Activations, fired, quantile_delta
from headwater.sae.missing import rate_test, set_difference
from headwater.sae.nulls import auroc, random_feature_auroc
from headwater.tests.claims.results import record

pytestmark = pytest.mark.claim
pytest.importorskip("torch", reason="the extra `local` is not installed")

LAYER, N_DRAWS, SEED_KINDS = 15, 12, 8
PARTS = {"anchor": slice(0, 6), "seed": slice(6, 10), "fresh": slice(10, 14)}
"""Rows of every kind: each draw's anchor takes the first part of all kinds, its seed the second part of a third of
them, and the third part, which neither the SAE nor F_miss has seen, is told apart."""
QUANTILES = (0.25, 0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Shipped:
    features: Activations
    kinds: NDArray[np.str_]
    part: NDArray[np.str_]
    explained_variance: float


@pytest.fixture(scope="module")
def shipped(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    """Features of the shipped anchor's rows, under an SAE trained without the fresh ones."""
    from headwater.llm.embedded import embedded_model_folder
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.extract import extract_features
    from headwater.sae.train import collect_activations, train_space

    path = Path(__file__).parents[2] / "pipelines" / "data" / "anchor.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    kinds = np.array([row["kind"] for row in rows])
    part = np.empty(len(rows), dtype="<U6")
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        for name, where in PARTS.items():
            part[own[where]] = name
    engine = TransformersEngine(model=embedded_model_folder(embedded_cache), name="smollm2-135m")
    chats = [[Message("user", row["text"])] for row in rows]
    seen = [chat for chat, name in zip(chats, part, strict=True) if name != "fresh"]
    tokens = collect_activations(engine, seen, LAYER, tmp_path_factory.mktemp("activations"))
    space, report = train_space(tokens, SaeTrainConfig(), seed=0)
    found = extract_features(engine.hidden_states(chats, LAYER), space)
    return Shipped(Activations.from_rows(found, space.width), kinds, part, report.explained_variance)


def test_rows_of_missing_kinds_fire_the_missing_features(shipped: Shipped) -> None:
    table: list[list[Any]] = []
    for name, find in (("rate test", rate_test), ("set difference", set_difference)):
        for quantile in QUANTILES:
            observed, nulls, lengths, sizes = [], [], [], []
            for draw in range(N_DRAWS):
                rng = np.random.default_rng(draw)
                seed_kinds = rng.choice(np.unique(shipped.kinds), SEED_KINDS, replace=False)
                in_seed = np.isin(shipped.kinds, seed_kinds)
                anchor = shipped.features.take(np.flatnonzero(shipped.part == "anchor"))
                seed = shipped.features.take(np.flatnonzero((shipped.part == "seed") & in_seed))
                fresh = np.flatnonzero(shipped.part == "fresh")
                delta = quantile_delta(anchor.values, quantile)
                missing = find(anchor, seed, delta, min_support=2).mask
                if not missing.any():
                    continue
                rows, is_missing = shipped.features.take(fresh), ~in_seed[fresh]
                live = fired(anchor, delta) | fired(seed, delta)
                result = random_feature_auroc(rows, is_missing, missing, delta=delta, rng=rng, live=live)
                observed.append(result.observed)
                nulls.append(result.mean)
                lengths.append(auroc(rows.n_tokens.astype(np.float64), is_missing))
                sizes.append(int(missing.sum()))
            values = [float(np.mean(v)) if v else float("nan") for v in (observed, nulls, lengths, sizes)]
            table.append([name, quantile, *values, min(observed, default=float("nan")), len(observed)])
    record(
        "Missing features belong to what is missing (shipped kinds)",
        f"SmolLM2-135M, layer {LAYER}, SAE of 2,048 features (held-out explained variance "
        f"{shipped.explained_variance:.2f}); {N_DRAWS} draws of {SEED_KINDS} seed kinds out of 24; per kind 6 anchor, "
        "4 seed and 4 fresh rows, the fresh ones unseen by the SAE. Score: missing features fired per token. Null: "
        "equally many random live features, 20 draws each.",
        ("test", "δ quantile", "AUROC", "null", "length alone", "missing", "worst draw", "draws"),
        table,
        "AUROC 0.5 is chance. A draw in which nothing was missing is left out and not counted. With six rows of a kind "
        "the rate test has little power: at a high δ few features fire often enough to be told from chance, and its "
        "set shrinks to nothing. The set difference holds at all δ here, because anchor and seed are small.",
    )
    by_setting = {(name, quantile): (observed, null) for name, quantile, observed, null, *_ in table}
    for setting, margin in (
        (("set difference", 0.5), 0.15),
        (("set difference", 0.7), 0.15),
        (("rate test", 0.25), 0.1),
        (("rate test", 0.5), 0.1),
    ):
        observed_mean, null_mean = by_setting[setting]
        assert observed_mean > null_mean + margin, (setting, observed_mean, null_mean)
        assert abs(null_mean - 0.5) < 0.1
