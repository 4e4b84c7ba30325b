"""The anchor's features that the seed never fires, or more rarely, with the anchor's texts that fire them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from headwater.core.errors import ConfigError
from headwater.core.rows import row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.registry import EngineConfig
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.fac.own_tokens import OwnTokens
from headwater.stages.fac.space_artifact import MissingFacts, open_space, write_missing_facts

if TYPE_CHECKING:
    from headwater.sae.coverage import Activations
    from headwater.sae.missing import MissingFeatures
    from headwater.sae.spans import Span

SPANS = pa.list_(
    pa.struct(
        [
            pa.field("row", pa.string()),
            pa.field("value", pa.float32()),
            pa.field("text", pa.string()),
            pa.field("peak", pa.string()),
        ]
    )
)
"""Anchor passages that end at the token where the feature peaks; `text` marks that token with << >>."""

Status = Literal["missing", "random", "present"]

MISSING_SCHEMA = schema(
    feature=pa.int32(),
    status=pa.string(),
    anchor_support=pa.int32(),
    seed_support=pa.int32(),
    p_value=pa.float64(),
    anchor_max=pa.float32(),
    spans=SPANS,
    examples=pa.list_(pa.string()),
    example_rows=pa.list_(pa.string()),
    explanation=pa.string(),
    verified=pa.string(),
    relevance=pa.string(),
    detection=pa.float32(),
    fuzzing=pa.float32(),
)
"""One row per missing feature (`status` "missing"); for the control also the "random" ones that were drawn, and where a
judge is to look at all of the anchor's features, those "present" in the seed. The last five columns are null until a
judge has interpreted the feature."""


class MissingConfig(StageConfig):
    model: EngineConfig
    """The model whose tokens the spans are cut by."""
    delta: float | None = Field(None, ge=0)
    """δ as a number. Means nothing across SAEs: prefer `delta_quantile`."""
    delta_quantile: float = Field(0.8, ge=0, lt=1)
    """δ as this quantile of the anchor's positive activations, when `delta` is not given."""
    test: Literal["rate", "set_difference"] = "rate"
    """`rate`: the anchor fires the feature at a higher rate (Fisher's exact test); `set_difference`: the seed never
    fires it, the definition of the paper, which depends on how large the seed is."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Level of the rate test."""
    control_false_discoveries: bool = False
    """Benjamini-Hochberg over all features tested. With a few hundred rows no feature of a single kind passes it."""
    min_support: int = Field(2, ge=1)
    """Anchor rows that must fire a feature before it counts."""
    random_features: int = Field(0, ge=0)
    """A control: this many live features that are not missing, though no more than are, are drawn beside them."""
    every_live: bool = False
    """Whether features of the anchor that the seed fires too get a row: a judge may then say which are relevant."""
    spans: int = Field(10, ge=1)
    """Spans kept per feature."""
    examples: int = Field(5, ge=1)
    """Anchor rows kept per feature, the strongest ones."""
    expected: int = Knob(200, ge=1)
    """For the forecast: how many features may be missing, which nobody knows before."""
    allow_empty: bool = False
    """Whether it is an acceptable result that nothing is missing."""
    max_tokens: int = Field(256, ge=1)
    """As in the features stage."""
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)
    """As in the features stage."""


class Missing(TableStage[MissingConfig]):
    name: ClassVar[str] = "missing"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "anchor": ("id", "text", "messages"),
        "anchor_features": ("row", "n_tokens", "features", "values", "positions"),
        "seed_features": ("row", "n_tokens", "features", "values", "positions"),
        "space": (),
    }

    @property
    def output(self) -> pa.Schema:
        return MISSING_SCHEMA

    @property
    def may_be_empty(self) -> bool:
        return True

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"model": self.config.model}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=self.config.expected)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        width = open_space(inputs["space"]).width
        anchor, seed = (
            load_activations(inputs["anchor_features"], width),
            load_activations(inputs["seed_features"], width),
        )
        facts = self._facts(anchor)
        found = find_missing(anchor, seed, facts)
        for warning in found.warnings:
            context.note(warning)
        metrics = self._metrics(anchor, seed, found, facts)
        if not len(found) and not self.config.allow_empty:
            raise _none_eligible(metrics) if not found.n_tested else _nothing_missing(metrics)
        status = self._status(anchor, found, facts, context)
        tokens = OwnTokens(inputs["anchor"], inputs["anchor_features"], self.config, context)
        out.write_rows(self._rows(status, anchor, seed, facts, tokens))
        write_missing_facts(out, facts)
        out.metrics = metrics

    def _facts(self, anchor: Activations) -> MissingFacts:
        from headwater.sae.coverage import quantile_delta

        config = self.config
        delta = quantile_delta(anchor.values, config.delta_quantile) if config.delta is None else config.delta
        return MissingFacts(
            delta=delta,
            delta_quantile=config.delta_quantile if config.delta is None else None,
            min_support=config.min_support,
            test=config.test,
            alpha=config.alpha,
            control_false_discoveries=config.control_false_discoveries,
            width=anchor.width,
        )

    def _status(
        self, anchor: Activations, found: MissingFeatures, facts: MissingFacts, context: StageContext
    ) -> dict[int, Status]:
        """The features that get a row, ascending."""
        from headwater.sae.coverage import fired

        live = np.flatnonzero(fired(anchor, facts.delta, min_support=facts.min_support) & ~found.mask)
        status: dict[int, Status] = dict.fromkeys(found.features.tolist(), "missing")
        if self.config.every_live:
            status |= dict.fromkeys(live.tolist(), "present")
        rng = np.random.default_rng(derive_seed(context.run_seed, self.name))
        drawn = rng.choice(live, min(self.config.random_features, len(found), len(live)), replace=False)
        return dict(sorted((status | dict.fromkeys(drawn.tolist(), "random")).items()))

    def _rows(
        self,
        status: Mapping[int, Status],
        anchor: Activations,
        seed: Activations,
        facts: MissingFacts,
        tokens: OwnTokens,
    ) -> list[dict[str, Any]]:
        from headwater.sae.coverage import support
        from headwater.sae.missing import fisher_one_sided
        from headwater.sae.spans import collect_spans

        features = np.fromiter(status, dtype=np.int64)
        in_anchor, in_seed = support(anchor, facts.delta)[features], support(seed, facts.delta)[features]
        p_values = fisher_one_sided(in_anchor, in_seed, anchor.n_rows, seed.n_rows)
        spans = collect_spans(
            anchor, list(status), tokens.of, delta=facts.delta, n_top=max(self.config.spans, self.config.examples)
        )
        rows = []
        for index, (feature, state) in enumerate(status.items()):
            found = spans[feature]
            examples = found[: self.config.examples]
            rows.append(
                {
                    "id": row_id(self.name, [], feature),
                    "feature": feature,
                    "status": state,
                    "anchor_support": int(in_anchor[index]),
                    "seed_support": int(in_seed[index]),
                    "p_value": float(p_values[index]),
                    "anchor_max": found[0].value,
                    "spans": [self._span(span, tokens) for span in found[: self.config.spans]],
                    "examples": [tokens.text(span.row) for span in examples],
                    "example_rows": [tokens.row_id(span.row) for span in examples],
                    **dict.fromkeys(("explanation", "verified", "relevance", "detection", "fuzzing")),
                }
            )
        return rows

    def _span(self, span: Span, tokens: OwnTokens) -> dict[str, Any]:
        return {
            "row": tokens.row_id(span.row),
            "value": span.value,
            "text": span.marked,
            "peak": span.tokens[-1].strip(),
        }

    def _metrics(
        self, anchor: Activations, seed: Activations, found: MissingFeatures, facts: MissingFacts
    ) -> dict[str, Any]:
        from dataclasses import asdict

        from headwater.sae.coverage import fac, fired, set_difference_mask

        difference = set_difference_mask(anchor, seed, facts.delta, min_support=facts.min_support)
        return {
            **asdict(facts),
            "missing": len(found),
            "missing_by_set_difference": int(difference.sum()),
            "missing_by_both": int((difference & found.mask).sum()),
            "fired_in_anchor": int(fired(anchor, facts.delta).sum()),
            "live_in_anchor": int(fired(anchor, facts.delta, min_support=facts.min_support).sum()),
            "fac_before": asdict(fac(seed, anchor, facts.delta, min_support=facts.min_support)),
            "warnings": list(found.warnings),
            "anchor_rows": anchor.n_rows,
            "seed_rows": seed.n_rows,
            "control": "random_features" if self.config.random_features else None,
        }


def _none_eligible(metrics: Mapping[str, Any]) -> ConfigError:
    """That the seed fires all of nothing would say nothing about the seed."""
    fired = metrics["fired_in_anchor"]
    above = f"δ = {metrics['delta']:.3g}" + ("" if metrics["delta_quantile"] is not None else " (`missing.delta`)")
    if fired:
        return ConfigError(
            f"No feature of the anchor can be missing: in its {_rows(metrics['anchor_rows'])} {fired:,} features "
            f"fire above {above}, but none of them in `missing.min_support` = {_rows(metrics['min_support'])}.",
            todo="Give an anchor of more rows, or lower missing.min_support.",
        )
    return ConfigError(
        f"No feature of the anchor can be missing: no feature fires above {above} in any of its "
        f"{_rows(metrics['anchor_rows'])}, where `missing.min_support` asks for {_rows(metrics['min_support'])}.",
        todo="Lower missing.delta, or leave it out for a quantile of the anchor's activations.",
    )


def _nothing_missing(metrics: Mapping[str, Any]) -> ConfigError:
    sizes = (f"the seed ({_rows(metrics['seed_rows'])})", f"the anchor ({_rows(metrics['anchor_rows'])})")
    todo = "Give a seed that lacks something, or set allow_empty: true to accept an empty dataset."
    if metrics["test"] == "set_difference":
        return ConfigError(
            f"Nothing is missing: {sizes[0]} fires each of the {metrics['live_in_anchor']:,} features that {sizes[1]} "
            f"fires in at least {_rows(metrics['min_support'])}.",
            todo=todo,
        )
    never = metrics["missing_by_set_difference"]
    return ConfigError(
        f"Nothing is missing: {sizes[0]} fires none of the {metrics['live_in_anchor']:,} features tested more rarely "
        f"than {sizes[1]} by the rate test (`missing.alpha` = {metrics['alpha']:g}"
        + (", false discoveries controlled)" if metrics["control_false_discoveries"] else ")")
        + (f", though it never fires {never:,} of them." if never else "."),
        todo=f"`missing.test: set_difference` counts those {never:,}. {todo}" if never else todo,
    )


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def load_activations(output: StageOutput, width: int) -> Activations:
    """The sparse table that a features stage wrote."""
    from headwater.sae.coverage import Activations

    return Activations.from_frame(output.read().select("n_tokens", "features", "values", "positions"), width)


def find_missing(anchor: Activations, seed: Activations, facts: MissingFacts) -> MissingFeatures:
    """F_miss as `facts` defines it."""
    from headwater.sae.missing import rate_test, set_difference

    if facts.test == "set_difference":
        return set_difference(anchor, seed, facts.delta, min_support=facts.min_support)
    return rate_test(
        anchor,
        seed,
        facts.delta,
        alpha=facts.alpha,
        min_support=facts.min_support,
        control_false_discoveries=facts.control_false_discoveries,
    )
