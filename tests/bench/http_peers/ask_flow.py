"""A flow as an installed package would provide it: prompts, and the ordinary row stage that asks about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pyarrow as pa
from pydantic import Field

from headwater.core.rows import MESSAGES, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.data_cards.card import DatasetCard, Split, StageUse, Table
from headwater.data_cards.report import Report
from headwater.flows.graph import Graph, Node
from headwater.flows.recipe import Recipe
from headwater.flows.runs import Run
from headwater.stages.base import StageConfig, StageContext, TableStage
from headwater.stages.generate import Generate, GenerateConfig


class PromptsConfig(StageConfig):
    rows: int = Field(..., ge=1)


class Prompts(TableStage[PromptsConfig]):
    name: ClassVar[str] = "prompts"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {}

    @property
    def output(self) -> pa.Schema:
        return schema(prompt=MESSAGES)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        asked = ([{"role": "user", "content": f"row {n}"}] for n in range(self.config.rows))
        out.write_rows([{"id": row_id(self.name, [], n), "prompt": prompt} for n, prompt in enumerate(asked)])


class Ask(Recipe):
    flow: ClassVar[str] = "ask"

    prompts: PromptsConfig
    generate: GenerateConfig

    def graph(self) -> Graph:
        generate = Node("generate", Generate(self.generate), {"rows": "prompts"})
        return Graph((Node("prompts", Prompts(self.prompts)), generate), dataset="generate")

    def card(self, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
        made = outputs["generate"]
        meanings = {field.name: f"the reply's {field.name}" for field in Generate(self.generate).output}
        size = sum(path.stat().st_size for path in made.data_files)
        split = Split(name="train", path="dataset/train-*.parquet", rows=made.rows, bytes=size)
        return DatasetCard(
            title="Replies",
            summary="One reply per prompt.",
            licence="cc0-1.0",
            tables=(Table(arrow_schema=Generate(self.generate).output, meanings=meanings, splits=(split,)),),
            pipeline=self.pipeline,
            how="By asking.",
            stages=tuple(
                StageUse(
                    name=name,
                    version=1,
                    does="prompts or replies",
                    **{key: output.manifest["counts"][key] for key in ("attempted", "accepted", "rejected")},
                    fingerprint=output.manifest["fingerprint"]["digest"],
                )
                for name, output in outputs.items()
            ),
            recipe=self.resolved(),
            command=f"pipeline run {self.pipeline}",
            limits=("A benchmark's.",),
            fingerprint=made.manifest["fingerprint"]["digest"],
        )

    def report(self, run: Run, outputs: Mapping[str, StageOutput]) -> Report:
        return Report(
            title="Replies",
            lead=f"{outputs['generate'].rows} replies",
            not_shown=("How good the replies are.",),
            sections=(),
            command=f"pipeline run {self.pipeline}",
        )
