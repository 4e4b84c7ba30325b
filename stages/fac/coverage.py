"""What the new rows change: coverage before and after, at the run's δ and over a sweep, beside its nulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.errors import ConfigError
from headwater.core.rows import row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import StageConfig, StageContext, TableStage
from headwater.stages.fac.missing import find_missing, load_activations
from headwater.stages.fac.space_artifact import MissingFacts, missing_facts, open_space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headwater.sae.coverage import Activations, FiredBy

_HISTOGRAM_BINS = 20


class CoverageSettings(StageConfig):
    """What a recipe may say."""

    sweep: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95)
    """δ as these quantiles of the anchor's positive activations."""
    draws: int = Field(20, ge=15)
    """Draws of every null; single draws scatter widely."""


class CoverageConfig(CoverageSettings):
    all_judged: bool = False
    """Whether a judge was asked about all features of the anchor: then FAC counts those alone that it kept."""


class CoverageStage(TableStage[CoverageConfig]):
    """Rows: one per δ of the sweep. The comparison at the run's own δ is in the metrics.

    `facts` is what the missing stage found, `missing` what a judge left of it: a feature turned down is not missing.
    By the rate test the seed fires many missing features too, so what it fires of them stands beside what is gained.
    """

    name: ClassVar[str] = "coverage"
    version: ClassVar[int] = 2
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "facts": ("feature", "status"),
        "missing": ("feature", "status"),
        "targets": ("feature", "chosen"),
        "space": (),
        "anchor_features": ("row", "n_tokens", "features", "values", "positions"),
        "seed_features": ("row", "n_tokens", "features", "values", "positions"),
        "dataset": ("id", "source"),
        "features.1": ("row", "n_tokens", "features", "values", "positions"),
    }

    @property
    def output(self) -> pa.Schema:
        share = pa.float64()
        return schema(
            quantile=pa.float64(),
            delta=pa.float64(),
            n_anchor=pa.int64(),
            n_seed=pa.int64(),
            n_missing=pa.int64(),
            fac_before=share,
            fac_after=share,
            missing_before=share,
            missing_covered=share,
            missing_after=share,
            n_missing_never=pa.int64(),
            missing_never_covered=share,
        )

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        from headwater.sae.coverage import concatenate, fac, fired_by, sweep

        width = open_space(inputs["space"]).width
        facts = missing_facts(inputs["facts"])
        anchor, seed = (
            load_activations(inputs["anchor_features"], width),
            load_activations(inputs["seed_features"], width),
        )
        made = self._dataset_activations(inputs, width)
        kept = _mask(inputs["missing"].read()["feature"].to_numpy(), width)
        turned_down = _mask(inputs["facts"].read()["feature"].to_numpy(), width) & ~kept
        relevant = kept if self.config.all_judged else None

        def missing_at(delta: float) -> NDArray[np.bool_]:
            found = find_missing(anchor, seed, _at(facts, delta)).mask & ~turned_down
            return found if relevant is None else found & relevant

        points = sweep(
            anchor,
            seed,
            made,
            self.config.sweep,
            min_support=facts.min_support,
            relevant=relevant,
            find_missing=missing_at,
        )
        out.write_rows([{"id": row_id(self.name, [], i), **asdict(point)} for i, point in enumerate(points)])
        chosen = _mask(inputs["targets"].read().filter("chosen")["feature"].to_numpy(), width)
        missing = missing_at(facts.delta)
        both = concatenate(seed, made)
        out.metrics = {
            "delta": facts.delta,
            "before": asdict(fac(seed, anchor, facts.delta, min_support=facts.min_support, relevant=relevant)),
            "after": asdict(fac(both, anchor, facts.delta, min_support=facts.min_support, relevant=relevant)),
            "new_alone": asdict(fac(made, anchor, facts.delta, min_support=facts.min_support, relevant=relevant)),
            **_named("missing", fired_by(missing, seed, made, facts.delta)),
            **_named("chosen", fired_by(chosen, seed, made, facts.delta)),
            "rows": made.n_rows,
            "activation_histogram": _histogram(anchor, made, missing, facts.delta),
            "tokens": {name: _lengths(table) for name, table in (("anchor", anchor), ("seed", seed), ("new", made))},
        } | self._nulls(anchor, seed, made, missing, facts, relevant, context)

    def _dataset_activations(self, inputs: Mapping[str, StageOutput], width: int) -> Activations:
        from headwater.sae.coverage import Activations

        wanted = inputs["dataset"].read().select(row="source")
        tables = [inputs[name].scan() for name in ("features.1", "features.2") if name in inputs]
        found = wanted.lazy().join(pl.concat(tables), on="row", how="left", maintain_order="left").collect()
        return Activations.from_frame(found.select("n_tokens", "features", "values", "positions"), width)

    def _nulls(  # noqa: PLR0917 - everything measured so far is compared
        self,
        anchor: Activations,
        seed: Activations,
        made: Activations,
        missing: NDArray[np.bool_],
        facts: MissingFacts,
        relevant: NDArray[np.bool_] | None,
        context: StageContext,
    ) -> dict[str, Any]:
        """Equally many random live features, and anchor rows of the same number and lengths as the new ones."""
        from headwater.sae.coverage import fired
        from headwater.sae.nulls import length_matched_coverage, random_feature_coverage

        if not missing.any() or not made.n_rows:
            return {"random_features": None, "length_matched_anchor": None}
        rng = np.random.default_rng(derive_seed(context.run_seed, self.name))
        live = fired(anchor, facts.delta) | fired(seed, facts.delta)
        if relevant is not None:
            live &= relevant
        nulls: dict[str, Any] = {"random_features": None, "length_matched_anchor": None}
        try:
            random = random_feature_coverage(made, missing, live, delta=facts.delta, rng=rng, n_draws=self.config.draws)
            nulls["random_features"] = {"observed": random.observed, "mean": random.mean, "q95": random.q95}
            matched = length_matched_coverage(
                made, anchor, missing, delta=facts.delta, rng=rng, n_draws=self.config.draws
            )
        except ConfigError as error:
            return nulls | {"why_not": error.what}
        comparison = matched.comparison
        nulls["length_matched_anchor"] = {
            "observed": comparison.observed,
            "mean": comparison.mean,
            "q95": comparison.q95,
            "rows": matched.n_rows,
            "unmatched": matched.n_unmatched,
        }
        return nulls


def _at(facts: MissingFacts, delta: float) -> MissingFacts:
    from dataclasses import replace

    return replace(facts, delta=delta)


def _mask(features: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    mask = np.zeros(width, dtype=np.bool_)
    mask[features] = True
    return mask


def _named(name: str, found: FiredBy) -> dict[str, Any]:
    return {
        name: found.n,
        f"{name}_before": found.seed,
        f"{name}_covered": found.generated,
        f"{name}_after": found.both,
        f"{name}_never": found.n_never,
        f"{name}_never_covered": found.never_generated,
    }


def _histogram(anchor: Activations, made: Activations, missing: NDArray[np.bool_], delta: float) -> dict[str, Any]:
    """Activations of missing features above 0: in the anchor and in the new rows, over common bins."""
    tables = {"anchor": anchor, "new": made}
    values = {name: table.values[missing[table.features]] for name, table in tables.items()}
    top = max((float(v.max()) for v in values.values() if v.size), default=1.0)
    edges = np.linspace(0.0, top, _HISTOGRAM_BINS + 1)
    return {
        "edges": [round(float(edge), 4) for edge in edges],
        "delta": delta,
        **{name: np.histogram(found, edges)[0].tolist() for name, found in values.items()},
    }


def _lengths(table: Activations) -> dict[str, float]:
    return {
        "rows": table.n_rows,
        "tokens": int(table.n_tokens.sum()),
        "mean": float(table.n_tokens.mean()) if table.n_rows else 0.0,
    }
