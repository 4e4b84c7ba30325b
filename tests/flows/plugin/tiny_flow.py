"""A flow that an installed package would provide: three real stages, small enough for tests.

`count` writes numbers, `square` is a row stage that may be slow or fail on purpose, `keep` drops the odd ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from headwater.core.errors import PermanentError
from headwater.core.rows import Reject, Row, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.data_cards.card import DatasetCard, Split, StageUse, Table
from headwater.data_cards.report import Report
from headwater.flows.graph import Graph, Node
from headwater.flows.recipe import Recipe
from headwater.flows.runs import Run
from headwater.llm.registry import EngineConfig, price_names
from headwater.llm.types import ChatRequest, Message, Sampling
from headwater.stages.base import Call, Forecast, Knob, RowStage, StageConfig, StageContext, TableStage

NUMBERS = schema(number=pa.int64())


class CountConfig(StageConfig):
    rows: int = Field(6, ge=1)
    file: str | None = Knob(None)
    """A text file whose number of lines replaces `rows`."""
    wait_s: float = Knob(0.0)


class Count(TableStage[CountConfig]):
    name: ClassVar[str] = "count"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {}

    @property
    def output(self) -> pa.Schema:
        return NUMBERS

    @property
    def total(self) -> int:
        if self.config.file is None:
            return self.config.rows
        return len(Path(self.config.file).read_text("utf-8").splitlines())

    def external_inputs(self) -> Mapping[str, Any]:
        return {"total": self.total}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=self.total)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        ends = time.monotonic() + self.config.wait_s
        while time.monotonic() < ends:
            context.check()
            time.sleep(0.01)
        out.write_rows([{"id": row_id(self.name, [], n), "number": n} for n in range(self.total)])


class SquareConfig(StageConfig):
    wait_s: float = Knob(0.0)
    """Seconds each row takes."""
    concurrency: int = Knob(2, ge=1)
    fail_at: int | None = Knob(None)
    """Number at which the stage fails for good."""
    crash_at: int | None = Knob(None)
    """Number at which it meets an error nobody expected."""
    engine: EngineConfig | None = None
    """Ask it about every number; its answer is the row's `said`."""
    log: str | None = Knob(None)
    """File that gets one line per processed row, so that a test sees what was done again; `.started` tells that the
    first is in flight."""


class Square(RowStage[SquareConfig]):
    name: ClassVar[str] = "square"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("id", "number")}

    @property
    def output(self) -> pa.Schema:
        return schema(number=pa.int64(), square=pa.int64(), said=pa.string())

    @property
    def concurrency(self) -> int:
        return self.config.concurrency

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {} if self.config.engine is None else {"engine": self.config.engine}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        n = rows["rows"]
        if self.config.engine is None:
            return Forecast(rows=n)
        return Forecast(rows=n, calls=n, tokens_in=n * 10, tokens_out=n * 20, model=price_names(self.config.engine)[0])

    async def process(self, row: Row, call: Call) -> Sequence[dict[str, Any]] | Reject:
        number = int(row["number"])
        if number == self.config.fail_at:
            raise PermanentError(f"The number {number} has no square here.", todo="Unset square.fail_at.")
        if number == self.config.crash_at:
            raise ZeroDivisionError("nobody expected this")
        if self.config.log is not None:
            Path(f"{self.config.log}.started").touch()
        await asyncio.sleep(self.config.wait_s)
        said = None
        if self.config.engine is not None:
            question = (Message("user", f"What is {number} squared?"),)
            said = (await call.chat(ChatRequest(row["id"], question, Sampling(), seed=number))).text
        if self.config.log is not None:
            with Path(self.config.log).open("a") as file:
                file.write(f"{number}\n")
        return [{"number": number, "square": number * number, "said": said}]


class Keep(TableStage[StageConfig]):
    name: ClassVar[str] = "keep"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("id", "square")}

    @property
    def output(self) -> pa.Schema:
        return schema(square=pa.int64())

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        rows = inputs["rows"].read().to_dicts()
        even = [row for row in rows if row["square"] % 2 == 0]
        out.write_rows([{"id": row_id(self.name, [row["id"]]), "square": row["square"]} for row in even])
        out.reject([Reject(row["id"], "odd", raw=str(row["square"])) for row in rows if row["square"] % 2])


class Deep(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(0.5, ge=0, le=1)
    api_key_env: str = ""


class Tiny(Recipe):
    flow: ClassVar[str] = "tiny"

    count: CountConfig = CountConfig()
    square: SquareConfig = SquareConfig()
    deep: Deep = Deep()
    paths: tuple[str, ...] = ()

    def graph(self) -> Graph:
        return Graph(
            (
                Node("count", Count(self.count)),
                Node("square", Square(self.square), {"rows": "count"}),
                Node("keep", Keep(StageConfig()), {"rows": "square"}),
            ),
            dataset="keep",
        )

    def card(self, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
        table = Table(
            arrow_schema=Keep(StageConfig()).output,
            meanings={"id": "the row", "square": "an even square"},
            splits=(Split(name="train", path="dataset/train-*.parquet", rows=outputs["keep"].rows, bytes=1),),
        )
        stages = tuple(
            StageUse(
                name=name,
                version=1,
                does="something",
                attempted=output.manifest["counts"]["attempted"],
                accepted=output.manifest["counts"]["accepted"],
                rejected=output.manifest["counts"]["rejected"],
                fingerprint=output.manifest["fingerprint"]["digest"],
            )
            for name, output in outputs.items()
        )
        return DatasetCard(
            title="Even squares",
            summary="Squares.",
            licence="cc0-1.0",
            tables=(table,),
            pipeline=self.pipeline,
            how="By squaring.",
            stages=stages,
            recipe=self.resolved(),
            command=f"pipeline run {self.pipeline}",
            limits=("Squares only.",),
            fingerprint=outputs["keep"].manifest["fingerprint"]["digest"],
        )

    def report(self, run: Run, outputs: Mapping[str, StageOutput]) -> Report:
        return Report(
            title="Even squares",
            lead=f"{outputs['keep'].rows} rows",
            not_shown=("Odd squares.",),
            sections=(),
            command=f"pipeline run {self.pipeline}",
        )
