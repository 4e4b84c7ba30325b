"""Keep what fires a missing feature, strongest first, without near-duplicates and without copies of the anchor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.rows import Reject, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.core.text import words
from headwater.stages.base import Forecast, StageConfig, StageContext, TableStage
from headwater.stages.curate.near_duplicates import near_duplicates
from headwater.stages.fac.space_artifact import missing_facts

SELECTED_SCHEMA = schema(
    text=pa.string(),
    feature=pa.int32(),
    activation=pa.float32(),
    explanation=pa.string(),
    fires=pa.list_(pa.int32()),
    step=pa.int8(),
    source=pa.string(),
    cleaned=pa.bool_(),
    engine=pa.string(),
    model=pa.string(),
    prompt_hash=pa.string(),
    seed=pa.int64(),
    parents=pa.list_(pa.string()),
)


class SelectConfig(StageConfig):
    per_feature: int = Field(2, ge=1)
    """Rows kept for each missing feature, aimed at or not. A row that fires several is kept for one of them and names
    the others in `fires`."""
    duplicate_threshold: float = Field(0.6, ge=0.1, le=1)
    """Jaccard similarity of word 3-grams from which two rows are near-duplicates."""
    copy_ngram: int = Field(8, ge=2)
    """A row that shares so many words in a row with an anchor or seed row is a copy; a shorter row is one if its whole
    text stands in such a row. In a script without spaces, characters count in place of words."""


@dataclass
class _Candidate:
    id: str
    text: str
    step: int
    facts: Mapping[str, Any]
    fires: dict[int, float] = field(default_factory=dict)


class Select(TableStage[SelectConfig]):
    """Inputs `prompts.N`, `texts.N` and `features.N` hold what step N (1, 2) made; step 2 may be absent."""

    name: ClassVar[str] = "select"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "facts": (),
        "targets": ("feature", "explanation"),
        "anchor": ("id", "text"),
        "seed": ("id", "text"),
        "prompts.1": ("id", "feature", "parents"),
        "texts.1": ("id", "request", "text", "cleaned"),
        "features.1": ("row", "features", "values"),
    }

    @property
    def output(self) -> pa.Schema:
        return SELECTED_SCHEMA

    @property
    def may_be_empty(self) -> bool:
        return True

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        made = sum(count for name, count in rows.items() if name.startswith("texts."))
        return Forecast(rows=min(made, rows["targets"] * self.config.per_feature))

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        delta = missing_facts(inputs["facts"]).delta
        targets = inputs["targets"].read()
        explanations = dict(zip(targets["feature"].to_list(), targets["explanation"].to_list(), strict=True))
        candidates = [c for step in (1, 2) if f"texts.{step}" in inputs for c in _candidates(inputs, step, delta)]
        for candidate in candidates:
            candidate.fires = {f: v for f, v in candidate.fires.items() if f in explanations}
        references = [*inputs["anchor"].read()["text"].to_list(), *inputs["seed"].read()["text"].to_list()]
        reasons = _unusable(candidates, references, self.config)
        usable = [c for c in candidates if c.id not in reasons]
        served = _choose(usable, list(explanations), self.config.per_feature)
        reasons |= {c.id: "over_budget" for c in usable if c.id not in served}
        out.write_rows([_row(c, served[c.id], explanations) for c in usable if c.id in served])
        out.reject(
            [Reject(c.id, reasons[c.id], _DETAILS[reasons[c.id]], c.text) for c in candidates if c.id in reasons]
        )
        context.progress(len(candidates), len(candidates))
        out.metrics = _metrics(candidates, reasons, served, delta)


_DETAILS = {
    "fires_no_missing_feature": "none of the features that a row may be kept for reaches δ",
    "copies_source": "shares a long run of words with a row of the anchor or the seed",
    "near_duplicate": "nearly the same as a row that fires its feature more strongly",
    "over_budget": "enough stronger rows fire the same features",
}


def _candidates(inputs: Mapping[str, StageOutput], step: int, delta: float) -> list[_Candidate]:
    prompts = inputs[f"prompts.{step}"].read().select(request="id", parents="parents")
    texts = inputs[f"texts.{step}"].read().join(prompts, on="request", how="left", maintain_order="left")
    found = {row["id"]: _Candidate(row["id"], row["text"], step, row) for row in texts.iter_rows(named=True)}
    firing = (
        inputs[f"features.{step}"]
        .scan()
        .select("row", "features", "values")
        .explode("features", "values")
        .filter(pl.col("values") > delta)
        .collect()
    )
    for row, feature, value in firing.iter_rows():
        found[row].fires[feature] = value
    return list(found.values())


def _unusable(candidates: Sequence[_Candidate], references: Sequence[str], config: SelectConfig) -> dict[str, str]:
    reasons: dict[str, str] = {}
    copies = CopyCheck(references, config.copy_ngram)
    for candidate in candidates:
        if not candidate.fires:
            reasons[candidate.id] = "fires_no_missing_feature"
        elif copies.is_copy(candidate.text):
            reasons[candidate.id] = "copies_source"
    ranked = sorted((c for c in candidates if c.id not in reasons), key=lambda c: (-max(c.fires.values()), c.id))
    texts = [*references, *(c.text for c in ranked)]
    originals = near_duplicates(texts, threshold=config.duplicate_threshold)[len(references) :]
    for candidate, original in zip(ranked, originals, strict=True):
        if original is not None:
            reasons[candidate.id] = "copies_source" if original < len(references) else "near_duplicate"
    return reasons


def _choose(candidates: Iterable[_Candidate], features: Sequence[int], per_feature: int) -> dict[str, int]:
    """Candidate id → the feature it is kept for. In turns: every feature takes its strongest row that is still free.

    The features with the fewest candidates choose first, so that a row which fires several goes to the one that has
    no other.
    """
    by_feature: dict[int, list[_Candidate]] = defaultdict(list)
    for candidate in candidates:
        for feature in candidate.fires:
            by_feature[feature].append(candidate)
    served: dict[str, int] = {}
    for _ in range(per_feature):
        for feature in sorted(features, key=lambda f: (len(by_feature[f]), f)):
            free = [candidate for candidate in by_feature[feature] if candidate.id not in served]
            if free:
                served[min(free, key=lambda c: (-c.fires[feature], c.id)).id] = feature
    return served


class CopyCheck:
    """Whether a text copies one of the references: n words in a row, or all of it when it is shorter than that."""

    def __init__(self, references: Sequence[str], n: int) -> None:
        self._references = [words(reference) for reference in references]
        self._n = n
        self._grams: dict[int, set[tuple[str, ...]]] = {}

    def is_copy(self, text: str) -> bool:
        own = words(text)
        n = min(self._n, len(own))
        if n == 0:
            return False
        if n not in self._grams:
            self._grams[n] = {tuple(ref[i : i + n]) for ref in self._references for i in range(len(ref) - n + 1)}
        return any(tuple(own[i : i + n]) in self._grams[n] for i in range(len(own) - n + 1))


def _row(candidate: _Candidate, feature: int, explanations: Mapping[int, str | None]) -> dict[str, Any]:
    facts = candidate.facts
    return {
        "id": row_id(Select.name, [candidate.id]),
        "text": candidate.text,
        "feature": feature,
        "activation": candidate.fires[feature],
        "explanation": explanations[feature],
        "fires": sorted(candidate.fires),
        "step": candidate.step,
        "source": candidate.id,
        **{name: facts[name] for name in ("cleaned", "engine", "model", "prompt_hash", "seed")},
        "parents": [candidate.id, *(facts["parents"] or [])],
    }


def _metrics(
    candidates: Sequence[_Candidate], reasons: Mapping[str, str], served: Mapping[str, int], delta: float
) -> dict[str, Any]:
    steps = {}
    for step in sorted({c.step for c in candidates}):
        ours = [c for c in candidates if c.step == step]
        steps[str(step)] = {
            "texts": len(ours),
            "fire_a_missing_feature": sum(bool(c.fires) for c in ours),
            "copies": sum(reasons.get(c.id) == "copies_source" for c in ours),
            "near_duplicates": sum(reasons.get(c.id) == "near_duplicate" for c in ours),
            "selected": sum(c.id in served for c in ours),
            "features_fired": len({f for c in ours for f in c.fires}),
            "features_fired_without_copies": len(
                {f for c in ours if reasons.get(c.id) != "copies_source" for f in c.fires}
            ),
        }
    return {"delta": delta, "steps": steps, "features_served": len(set(served.values()))}
