"""Claim: missing features belong to what is missing. Rows of kinds that the seed lacks fire F_miss, others do not.

On the shipped data. Negative control: equally many random live features in place of F_miss must not tell the rows
apart. Length alone is reported beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.llm.types import Message
from headwater.sae.config import SaeTrainConfig
from headwater.sae.coverage import Activations, Mask, fired, quantile_delta
from headwater.sae.missing import rate_test, set_difference
from headwater.sae.nulls import auroc, random_feature_auroc
from headwater.tests.claims.conftest import LAYER, RealSpace
from headwater.tests.claims.results import record
from headwater.tests.claims.sources import spread

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

pytestmark = pytest.mark.claim
pytest.importorskip("torch", reason="the extra `local` is not installed")

SHIPPED = Path(__file__).parents[2] / "pipelines" / "data"
N_DRAWS, SEED_KINDS = 12, 8
FRESH = 10
"""The rows of a kind from this one on (of 14) are fresh: neither an SAE nor F_miss sees them."""
QUANTILES = (0.25, 0.5, 0.7, 0.8, 0.9)
TESTS = {"rate test": rate_test, "set difference": set_difference}


@dataclass(frozen=True)
class Shipped:
    """The shipped anchor's rows and then the seed's."""

    kind: NDArray[np.str_]
    number: NDArray[np.int64]
    """Of a row among the anchor's rows of its kind; -1 for the seed's rows."""
    spaces: dict[str, Activations]
    """The rows' features under two SAEs: how it was trained → features."""

    @property
    def fresh(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.number >= FRESH)


@dataclass(frozen=True)
class Draw:
    anchor: NDArray[np.int64]
    seed: NDArray[np.int64]
    seed_kinds: NDArray[np.str_]


@pytest.fixture(scope="module")
def shipped(engine: TransformersEngine, real: RealSpace, tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    from headwater.sae.extract import extract_features
    from headwater.sae.train import collect_activations, train_space

    anchor, seed = (
        [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("anchor", "seed")
    )
    kind = np.array([row["kind"] for row in anchor + seed])
    number = np.full(len(kind), -1)
    for name in np.unique(kind):
        own = np.flatnonzero(kind[: len(anchor)] == name)
        number[own] = np.arange(len(own))
    chats = [[Message("user", row["text"])] for row in anchor + seed]
    seen = [chat for chat, n in zip(chats, number, strict=True) if n < FRESH]
    tokens = collect_activations(engine, seen, LAYER, tmp_path_factory.mktemp("activations"))
    space, report = train_space(tokens, SaeTrainConfig(), seed=0)
    spaces = {}
    for trained_on, ev, chosen in (
        ("the shipped rows but the fresh ones", report.explained_variance, space),
        ("real texts", real.explained_variance, real.space),
    ):
        found = extract_features(engine.hidden_states(chats, LAYER), chosen)
        spaces[f"{trained_on} (width {chosen.width:,}, EV {ev:.2f})"] = Activations.from_rows(found, chosen.width)
    return Shipped(kind, number, spaces)


def as_shipped(shipped: Shipped, rng: np.random.Generator) -> Draw:
    """Eight of the ten anchor rows of every kind that aren't fresh; the shipped seed, whole."""
    anchor = [
        rng.choice(np.flatnonzero((shipped.kind == kind) & (shipped.number >= 0) & (shipped.number < FRESH)), 8, False)
        for kind in np.unique(shipped.kind)
    ]
    seed = np.flatnonzero(shipped.number < 0)
    return Draw(np.concatenate(anchor), seed, np.unique(shipped.kind[seed]))


def kinds_drawn(shipped: Shipped, rng: np.random.Generator) -> Draw:
    """Any third of the kinds for the seed, at the price of fewer rows: six of every kind in the anchor, four in the
    seed."""
    kinds = rng.choice(np.unique(shipped.kind), SEED_KINDS, replace=False)
    anchor = np.flatnonzero((shipped.number >= 0) & (shipped.number < 6))
    seed = np.flatnonzero((shipped.number >= 6) & (shipped.number < FRESH) & np.isin(shipped.kind, kinds))
    return Draw(anchor, seed, kinds)


SETTINGS: dict[str, Callable[[Shipped, np.random.Generator], Draw]] = {
    "as shipped": as_shipped,
    "kinds drawn": kinds_drawn,
}


def test_rows_of_missing_kinds_fire_the_missing_features(shipped: Shipped) -> None:
    table: list[list[Any]] = []
    means: dict[tuple[str, str, str, float], tuple[float, float]] = {}
    for setting, (space, features), name, quantile in product(SETTINGS, shipped.spaces.items(), TESTS, QUANTILES):
        draws = [_one(shipped, features, setting, name, quantile, draw) for draw in range(N_DRAWS)]
        observed, nulls, lengths, sizes = zip(*(found for found in draws if found is not None), strict=True)
        columns = (float(np.mean(values)) for values in (nulls, lengths, sizes))
        table.append([setting, space, name, quantile, spread(observed), *columns, min(observed), len(observed)])
        means[setting, space, name, quantile] = float(np.mean(observed)), float(np.mean(nulls))
    record(
        "Missing features belong to what is missing (shipped kinds)",
        f"SmolLM2-135M, layer {LAYER}; told apart are 4 fresh rows of each of the 24 kinds, seen neither by the SAE "
        "nor in finding F_miss. *As shipped*: 8 anchor rows of every kind, drawn anew, against the shipped seed (16 "
        f"rows of each of 8 kinds). *Kinds drawn*: any {SEED_KINDS} kinds for the seed; 6 anchor and 4 seed rows a "
        f"kind, for there are no more. {N_DRAWS} draws each. Score: missing features fired per token. Null: equally "
        "many random live features, 20 times.",
        (
            "setting",
            "SAE trained on",
            "test",
            "δ quantile",
            "AUROC ± sd over draws",
            "null",
            "length alone",
            "missing",
            "worst draw",
            "draws",
        ),
        table,
        "AUROC 0.5 is chance. A draw in which nothing was missing is left out and not counted. The rate test needs "
        "rows: where the column of missing features is small, it has hardly anything to tell rows apart by.",
    )
    for (setting, space, name, quantile), (observed_mean, null_mean) in means.items():
        if (setting, name) == ("as shipped", "rate test") and quantile in (0.5, 0.8):
            assert observed_mean > null_mean + 0.2, (setting, space, quantile)
        if (setting, name) == ("kinds drawn", "set difference") and quantile in (0.5, 0.8):
            assert observed_mean > null_mean + 0.1, (setting, space, quantile)


def _one(  # noqa: PLR0917 - one cell of a table with as many headings
    shipped: Shipped, features: Activations, setting: str, test: str, quantile: float, draw: int
) -> tuple[float, float, float, int] | None:
    """AUROC, its null, that of length, and how many features are missing; None when none are."""
    rng = np.random.default_rng(draw)
    rows = SETTINGS[setting](shipped, rng)
    anchor, seed, fresh = features.take(rows.anchor), features.take(rows.seed), features.take(shipped.fresh)
    delta = quantile_delta(anchor.values, quantile)
    missing = TESTS[test](anchor, seed, delta, min_support=2).mask
    if not missing.any():
        return None
    of_missing_kind: Mask = ~np.isin(shipped.kind[shipped.fresh], rows.seed_kinds)
    live = fired(anchor, delta) | fired(seed, delta)
    result = random_feature_auroc(fresh, of_missing_kind, missing, delta=delta, rng=rng, live=live)
    length = auroc(fresh.n_tokens.astype(np.float64), of_missing_kind)
    return result.observed, result.mean, length, int(missing.sum())
