"""Which missing features to write for: what the seed never fires first, spread over the anchor's rows.

Every row of the output is a feature that new rows may be kept for; with a judge, one of those that it kept. `chosen`
marks those that prompts are written for; a row that happens to fire one of the others serves it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.errors import PermanentError
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import Forecast, StageConfig, StageContext, TableStage
from headwater.stages.fac.missing import MISSING_SCHEMA, load_activations
from headwater.stages.fac.space_artifact import missing_facts

if TYPE_CHECKING:
    from headwater.sae.coverage import Activations

TARGET_SCHEMA = pa.schema([*MISSING_SCHEMA, pa.field("chosen", pa.bool_())])


class TargetsConfig(StageConfig):
    limit: int = Field(60, ge=1)
    """Features to write prompts for: first those that the seed never fires above δ."""
    random_features: bool = False
    """A control: aim at the random live features in place of the missing ones."""
    allow_empty: bool = False
    """Whether it is a result that nothing is left to aim at."""


class Targets(TableStage[TargetsConfig]):
    name: ClassVar[str] = "targets"
    version: ClassVar[int] = 2
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "facts": (),
        "missing": tuple(MISSING_SCHEMA.names),
        "anchor_features": ("row", "n_tokens", "features", "values", "positions"),
    }

    @property
    def output(self) -> pa.Schema:
        return TARGET_SCHEMA

    @property
    def may_be_empty(self) -> bool:
        return True

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=rows["missing"])

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        facts = missing_facts(inputs["facts"])
        wanted = "random" if self.config.random_features else "missing"
        targets = inputs["missing"].read().filter(pl.col("status") == wanted).select(MISSING_SCHEMA.names)
        if targets.is_empty() and not self.config.allow_empty:
            raise _nothing_left(inputs["missing"], wanted)
        anchor = load_activations(inputs["anchor_features"], facts.width)
        absent = pl.col("seed_support") == 0
        chosen: list[int] = []
        # The rate test also finds what the seed fires too rarely: broad features, which would crowd out what it lacks.
        for group in (targets.filter(absent), targets.filter(~absent)):
            room = self.config.limit - len(chosen)
            chosen += spread(anchor, group["feature"].to_list(), facts.delta, room) if room else []
        out.write(targets.with_columns(chosen=pl.col("feature").is_in(chosen)))
        out.metrics = {"targets": targets.height, "chosen": len(chosen)}


def _nothing_left(output: StageOutput, wanted: str) -> PermanentError:
    turned_down = ", ".join(f"{reason} {count:,}" for reason, count in output.manifest["reasons"].items())
    accept = "set allow_empty: true to accept an empty dataset"
    if not turned_down:
        return PermanentError(f"There are no {wanted} features to write for.", todo=f"Give other data, or {accept}.")
    return PermanentError(
        f"Of the {wanted} features, the judge left none to write for ({turned_down}).",
        todo="Read `pipeline rows RUN --stage interpret --rejects`, then mend `judge.task` or take another judge; or "
        f"{accept}.",
    )


def spread(anchor: Activations, features: Sequence[int], delta: float, limit: int) -> list[int]:
    """At most `limit` of the features, so that together they fire on as many different anchor rows as they can.

    Greedy: each next feature is the one that fires on most rows not yet fired on; once no row is left, all count anew.
    A choice by support or p-value alone takes twenty features of one kind of row.
    """
    if len(features) <= limit:
        return list(features)
    entries = np.flatnonzero(anchor.values > delta)
    rows = anchor.rows_of(entries)
    firing: dict[int, set[int]] = {feature: set() for feature in features}
    for row, feature in zip(rows.tolist(), anchor.features[entries].tolist(), strict=True):
        if feature in firing:
            firing[feature].add(row)
    chosen: list[int] = []
    fresh: set[int] = set()
    while len(chosen) < limit:
        best = max(firing, key=lambda f: (len(firing[f] & fresh), len(firing[f]), -f))
        if not firing[best] & fresh:
            left = set().union(*firing.values())
            if fresh == left or not left:
                break
            fresh = left
            continue
        chosen.append(best)
        fresh -= firing.pop(best)
    return sorted(chosen)
