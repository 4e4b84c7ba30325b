"""Step two: the strongest and the weakest candidate of every feature form a contrastive pair.

Every candidate is scored against every feature aimed at ("pooled"), so that a text written for one feature can be the
strong example of another. Where no candidate fires a feature, the anchor's own strongest row stands in: a fallback,
which is counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.rows import row_id
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.fac.first_prompts import PROMPT_SCHEMA
from headwater.stages.fac.prompts import Style, second_prompt
from headwater.stages.fac.space_artifact import missing_facts

Source = Literal["pooled", "own", "anchor_row"]


class PairsConfig(StageConfig):
    style: Style = "list"
    generations: int = Field(4, ge=1)
    """Texts asked for per feature in step two (m)."""
    source: Source = "pooled"
    """Where the strong example comes from: the candidates of all features, of the feature itself, or (a control) always
    the anchor's strongest row, shown without a weak one."""
    contrast: bool = True
    """Whether the weak example is shown."""
    examples: int = Field(4, ge=0)
    """Anchor rows shown beside the strong example (style `list`)."""
    expected_features: int = Knob(60, ge=1)
    """For the forecast: how many features will be chosen at most."""


@dataclass(frozen=True, slots=True)
class _Example:
    row: str
    text: str
    value: float


class Pairs(TableStage[PairsConfig]):
    name: ClassVar[str] = "pairs"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "facts": (),
        "targets": ("id", "feature", "chosen", "examples", "example_rows", "anchor_max", "explanation"),
        "prompts": ("id", "feature"),
        "candidates": ("id", "request", "text"),
        "features": ("row", "features", "values"),
    }

    @property
    def output(self) -> pa.Schema:
        pair = {"good": pa.string(), "bad": pa.string(), "good_row": pa.string(), "bad_row": pa.string()}
        fields = [pa.field(name, kind) for name, kind in pair.items()]
        return pa.schema(
            [
                *PROMPT_SCHEMA,
                *fields,
                pa.field("good_value", pa.float32()),
                pa.field("bad_value", pa.float32()),
                pa.field("fallback", pa.bool_()),
            ]
        )

    @property
    def may_be_empty(self) -> bool:
        return True

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        features = min(rows["targets"], self.config.expected_features) or self.config.expected_features
        return Forecast(rows=features * self.config.generations)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        delta = missing_facts(inputs["facts"]).delta
        targets = inputs["targets"].read().filter("chosen")
        scores = candidate_scores(inputs, targets["feature"].to_list())
        rows: list[dict[str, Any]] = []
        counts = {"own_fires": 0, "anyone_fires": 0, "fallbacks": 0}
        for target in targets.iter_rows(named=True):
            scored = scores.filter(pl.col("feature") == target["feature"])
            own = scored.filter(pl.col("own"))
            counts["own_fires"] += bool(own.height and own["value"].max() > delta)  # type: ignore[operator]
            counts["anyone_fires"] += bool(scored.height and scored["value"].max() > delta)  # type: ignore[operator]
            good, bad, fallback = self._pair(target, scored, own, delta)
            counts["fallbacks"] += fallback
            rows += self._prompts(target, good, bad, fallback, context)
        out.write_rows(rows)
        features = max(targets.height, 1)
        out.metrics = {
            "features": targets.height,
            "source": self.config.source,
            "fallback_share": counts["fallbacks"] / features,
            "fallback_share_own": 1 - counts["own_fires"] / features,
            "fallback_share_pooled": 1 - counts["anyone_fires"] / features,
        }

    def _pair(
        self, target: Mapping[str, Any], scored: pl.DataFrame, own: pl.DataFrame, delta: float
    ) -> tuple[_Example, _Example | None, bool]:
        anchor = _Example(target["example_rows"][0], target["examples"][0], target["anchor_max"])
        if self.config.source == "anchor_row":
            return anchor, None, True
        ranked = (own if self.config.source == "own" else scored).sort(["value", "row"], descending=[True, False])
        best = _example(ranked.row(0, named=True)) if ranked.height and ranked["value"][0] > delta else None
        good = best or anchor
        weakest = own.filter(pl.col("row") != good.row).sort(["value", "row"])
        bad = _example(weakest.row(0, named=True)) if self.config.contrast and weakest.height else None
        return good, bad, best is None

    def _prompts(
        self, target: Mapping[str, Any], good: _Example, bad: _Example | None, fallback: bool, context: StageContext
    ) -> list[dict[str, Any]]:
        draw = random.Random(derive_seed(context.run_seed, self.name, target["id"]))
        shown = target["examples"][: self.config.examples]
        pair = (good.text, bad.text if bad else None)
        prompt = second_prompt(pair, shown, target["explanation"], self.config.style, draw)
        return [
            {
                "id": row_id(self.name, [target["id"]], sample),
                "feature": target["feature"],
                "sample": sample,
                "prompt": prompt,
                "parents": [good.row, *([bad.row] if bad else []), *target["example_rows"][: self.config.examples]],
                "good": good.text,
                "bad": bad.text if bad else None,
                "good_row": good.row,
                "bad_row": bad.row if bad else None,
                "good_value": good.value,
                "bad_value": bad.value if bad else None,
                "fallback": fallback,
            }
            for sample in range(self.config.generations)
        ]


def candidate_scores(inputs: Mapping[str, StageOutput], features: Sequence[int]) -> pl.DataFrame:
    """Every candidate that fires one of `features` at all, and every feature's own candidates even at 0.

    Columns: feature, row (the candidate's id), text, value (g_i), own (whether it was written for the feature).
    """
    candidates = (
        inputs["candidates"]
        .read()
        .select("id", "request", "text")
        .join(inputs["prompts"].read().select(request="id", written_for="feature"), on="request", how="inner")
        .select("id", "text", "written_for")
    )
    firing = (
        inputs["features"]
        .scan()
        .select("row", "features", "values")
        .explode("features", "values")
        .filter(pl.col("features").is_in(list(features)))
        .collect()
        .rename({"features": "feature", "values": "value"})
    )
    fired = firing.join(candidates.rename({"id": "row"}), on="row", how="inner").with_columns(
        own=pl.col("feature") == pl.col("written_for")
    )
    silent = (
        candidates.rename({"id": "row", "written_for": "feature"})
        .join(firing.select("row", "feature"), on=["row", "feature"], how="anti")
        .with_columns(value=pl.lit(0.0, dtype=pl.Float32), own=pl.lit(True))
    )
    columns = ["feature", "row", "text", "value", "own"]
    return pl.concat([fired.select(columns), silent.select(columns)]).filter(pl.col("feature").is_in(list(features)))


def _example(row: Mapping[str, Any]) -> _Example:
    return _Example(row["row"], row["text"], row["value"])
