"""Step one: for every chosen missing feature, prompts that ask for texts like the rows that fire it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pyarrow as pa
from pydantic import Field

from headwater.core.rows import MESSAGES, row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.fac.prompts import Style, first_prompt

PROMPT_SCHEMA = schema(feature=pa.int32(), sample=pa.int32(), prompt=MESSAGES, parents=pa.list_(pa.string()))
"""What both steps hand to the generator; step two adds the pair."""


class FirstPromptsConfig(StageConfig):
    style: Style = "list"
    candidates: int = Field(4, ge=1, lt=2**32)
    """Candidates per feature (n)."""
    examples: int = Field(5, ge=1)
    """Anchor rows shown per prompt, the strongest ones."""
    expected_features: int = Knob(60, ge=1)
    """For the forecast: how many features will be chosen at most."""


class FirstPrompts(TableStage[FirstPromptsConfig]):
    name: ClassVar[str] = "first-prompts"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "targets": ("feature", "chosen", "examples", "example_rows", "explanation")
    }

    @property
    def output(self) -> pa.Schema:
        return PROMPT_SCHEMA

    @property
    def may_be_empty(self) -> bool:
        return True

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        features = min(rows["targets"], self.config.expected_features) or self.config.expected_features
        return Forecast(rows=features * self.config.candidates)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        rows = []
        for target in inputs["targets"].read().filter("chosen").iter_rows(named=True):
            draw = random.Random(derive_seed(context.run_seed, self.name, target["id"]))
            shown = target["examples"][: self.config.examples]
            # One prompt for all samples: engines read it once, and sampling makes the difference.
            prompt = first_prompt(shown, target["explanation"], self.config.style, draw)
            rows += [
                {
                    "id": row_id(self.name, [target["id"]], sample),
                    "feature": target["feature"],
                    "sample": sample,
                    "prompt": prompt,
                    "parents": target["example_rows"][: self.config.examples],
                }
                for sample in range(self.config.candidates)
            ]
        out.write_rows(rows)
