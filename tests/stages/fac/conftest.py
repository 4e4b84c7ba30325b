"""Small hand-made tables of the FAC stages, in which every right answer can be read off."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.core.rows import MESSAGES, schema
from headwater.core.store import StageOutput
from headwater.stages.curate.load import Load, LoadConfig
from headwater.stages.fac.first_prompts import PROMPT_SCHEMA
from headwater.stages.fac.missing import MISSING_SCHEMA
from headwater.stages.fac.targets import TARGET_SCHEMA

FEATURES = schema(
    row=pa.string(),
    n_tokens=pa.int32(),
    features=pa.list_(pa.int32()),
    values=pa.list_(pa.float32()),
    positions=pa.list_(pa.int32()),
)
TEXTS = schema(
    request=pa.string(),
    text=pa.string(),
    messages=MESSAGES,
    prompt_hash=pa.string(),
    seed=pa.int64(),
    engine=pa.string(),
    model=pa.string(),
    cleaned=pa.bool_(),
)


def _found(features: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"missing-{feature}",
            "feature": feature,
            "anchor_support": len(examples),
            "seed_support": 0,
            "p_value": 0.01,
            "anchor_max": 9.0,
            "spans": [],
            "examples": list(examples),
            "example_rows": [f"anchor-{feature}-{n}" for n in range(len(examples))],
            **dict.fromkeys(("explanation", "verified", "relevance", "detection", "fuzzing")),
        }
        for feature, examples in features.items()
    ]


@dataclass(frozen=True)
class Tables:
    """Builders of stage outputs out of what a test cares about."""

    make: Callable[..., StageOutput]

    def missing(
        self,
        features: Mapping[int, Sequence[str]],
        *,
        delta: float = 1.0,
        facts: Mapping[str, Any] | None = None,
        in_seed: Collection[int] = (),
        **status: str,
    ) -> StageOutput:
        """Missing features, each with the anchor texts that fire it, and a run in which δ is `delta`.

        Those `in_seed` fire on a row of the seed too. `f7="random"` gives feature 7 another status; `facts` says how
        "missing" was defined where that matters.
        """
        rows = [
            row
            | {
                "status": status.get(f"f{row['feature']}", "missing"),
                "seed_support": int(row["feature"] in in_seed),
            }
            for row in _found(features)
        ]
        defined = {
            "delta": delta,
            "delta_quantile": None,
            "min_support": 1,
            "test": "set_difference",
            "alpha": 0.05,
            "control_false_discoveries": True,
            "width": 64,
            **(facts or {}),
        }
        return self.make("missing", MISSING_SCHEMA, rows, {"missing.json": json.dumps(defined)})

    def targets(self, features: Mapping[int, Sequence[str]], chosen: Collection[int]) -> StageOutput:
        """Missing features, of which `chosen` are aimed at."""
        rows = [row | {"status": "missing", "chosen": row["feature"] in chosen} for row in _found(features)]
        return self.make("targets", TARGET_SCHEMA, rows)

    def prompts(self, step: int, written_for: Mapping[str, int]) -> StageOutput:
        """Prompts by id, each with the feature that it asks for."""
        rows = [
            {"id": key, "feature": feature, "sample": n, "prompt": [], "parents": [f"shown-{key}"]}
            for n, (key, feature) in enumerate(written_for.items())
        ]
        return self.make(f"prompts.{step}", PROMPT_SCHEMA, rows)

    def texts(self, step: int, texts: Mapping[str, tuple[str, str]]) -> StageOutput:
        """Generated texts by id: (the prompt's id, the text)."""
        rows = [
            {
                "id": key,
                "request": request,
                "text": text,
                "messages": [{"role": "user", "content": text}],
                "prompt_hash": "hash",
                "seed": 1,
                "engine": "test",
                "model": "test",
                "cleaned": "owls" in text,
            }
            for key, (request, text) in texts.items()
        ]
        return self.make(f"texts.{step}", TEXTS, rows)

    def features(self, name: str, fires: Mapping[str, Mapping[int, float]]) -> StageOutput:
        """What each row fires: {row: {feature: value}}."""
        rows = [
            {
                "id": f"{name}-{row}",
                "row": row,
                "n_tokens": 5,
                "features": sorted(values),
                "values": [values[feature] for feature in sorted(values)],
                "positions": [0] * len(values),
            }
            for row, values in fires.items()
        ]
        return self.make(f"features.{name}", FEATURES, rows)

    def space(self, width: int) -> StageOutput:
        """A feature space of so many features; the stages that count ask it for nothing else."""
        artifacts: dict[str, bytes] = {}
        for name, array in (("mean", np.zeros(2, np.float32)), ("centroids", np.zeros((width, 2), np.float32))):
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            artifacts[f"clusters/{name}.npy"] = buffer.getvalue()
        return self.make("space", schema(), [], artifacts)

    def loaded(self, name: str, texts: Sequence[str]) -> StageOutput:
        rows: list[dict[str, Any]] = [
            {
                "id": f"{name}-{n}",
                "text": text,
                "messages": [{"role": "user", "content": text}],
                "label": None,
                "source_row": n,
                "cleaned": False,
            }
            for n, text in enumerate(texts)
        ]
        return self.make(name, Load(LoadConfig(source="unused")).output, rows)


@pytest.fixture
def tables(make_output: Callable[..., StageOutput]) -> Tables:
    return Tables(make_output)
