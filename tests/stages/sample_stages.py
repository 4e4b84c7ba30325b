"""Small real stages and engines for the tests of the runner: nothing here is a mock, everything runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa

from headwater.core.errors import BadOutput
from headwater.core.events import EventLog, read_events
from headwater.core.meter import Meter
from headwater.core.rows import Reject, Row, row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput, Workspace
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, EngineIdentity, Message, Sampling, Usage
from headwater.stages.base import Call, Knob, RowStage, StageConfig, StageContext, TableStage
from headwater.stages.engines import EnginePool

Answer = Callable[[ChatRequest, Sequence[str]], Any]
"""From a request and the ids of its whole batch to a reply's text, or to an error."""


class NumbersConfig(StageConfig):
    rows: int = 10
    reject_every: int = 0
    """Reject every so-many-th row; 0 rejects none."""
    max_reject_share: float = 1.0
    threads: int = Knob(1)


class Numbers(TableStage[NumbersConfig]):
    """Rows that count from 0."""

    name: ClassVar[str] = "numbers"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {}

    @property
    def output(self) -> pa.Schema:
        return schema(number=pa.int64())

    @property
    def max_reject_share(self) -> float:
        return self.config.max_reject_share

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        every = self.config.reject_every
        ids = [row_id(self.name, [], n) for n in range(self.config.rows)]
        bad = [n for n in range(self.config.rows) if every and n % every == 0]
        out.reject([Reject(ids[n], "round", f"{n} is a multiple of {every}", str(n)) for n in bad])
        good = sorted(set(range(self.config.rows)) - set(bad))
        out.write(pl.DataFrame({"id": [ids[n] for n in good], "number": good}, schema_overrides={"id": pl.String}))


class AskConfig(StageConfig):
    engine: str = "engine"
    calls: int = 1
    """Questions per row, one after the other, each about the answer before."""
    at_once: int = 1
    """Copies of every question, asked at the same time."""
    window: int = 8
    max_reject_share: float = Knob(1.0)
    concurrency: int = Knob(8)


class Ask(RowStage[AskConfig]):
    """Asks about every number; a row is rejected by its engine's reply, or for being 13."""

    name: ClassVar[str] = "ask"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("number",)}

    @property
    def output(self) -> pa.Schema:
        return schema(number=pa.int64(), text=pa.string(), seed=pa.int64())

    @property
    def concurrency(self) -> int:
        return self.config.concurrency

    @property
    def window(self) -> int:
        return self.config.window

    @property
    def max_reject_share(self) -> float:
        return self.config.max_reject_share

    def engine_configs(self) -> Mapping[str, Any]:
        return {"engine": self.config.engine}

    async def open(self, inputs: Mapping[str, StageOutput], context: StageContext) -> None:
        self._run_seed = context.run_seed

    async def process(self, row: Row, call: Call) -> Sequence[dict[str, Any]] | Reject:
        import asyncio

        if row["number"] == 13:
            return Reject(row["id"], "unlucky", "thirteen")
        seed = derive_seed(self._run_seed, self.name, row["id"])
        text = f"What about {row['number']}?"
        for turn in range(self.config.calls):
            asked = [
                call.chat(ChatRequest(f"{row['id']}/{turn}/{copy}", (Message("user", text),), Sampling(), seed + copy))
                for copy in range(self.config.at_once)
            ]
            text = " ".join([completion.text for completion in await asyncio.gather(*asked)])
        return [{"number": row["number"], "text": text, "seed": seed}]


class TotalConfig(StageConfig):
    pass


class Total(TableStage[TotalConfig]):
    """All answers in one line each, by number."""

    name: ClassVar[str] = "total"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"near": ("number", "text"), "far": ("number", "text")}

    @property
    def output(self) -> pa.Schema:
        return schema(line=pa.string())

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        told = [inputs[name].scan().with_columns(side=pl.lit(side)) for side, name in enumerate(("near", "far"))]
        both = pl.concat(told).sort("number", "side").collect()
        ids = [row_id(self.name, [parent], side) for parent, side in both.select("id", "side").iter_rows()]
        out.write(both.select(pl.Series("id", ids), line=pl.format("{}: {}", "number", "text")))


class LocalEngine:
    """Inside this process. Every reply depends on the whole batch, as the last digit of a float would."""

    batched = True

    def __init__(self, answer: Answer | None = None, batches: Path | None = None) -> None:
        self.batches: list[list[str]] = []
        """The request ids of every batch, in order."""
        self._answer = answer or of_the_batch
        self._log = batches

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity("local", "of-the-batch", "1", "", "")

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        batch = list(requests)
        ids = [request.id for request in batch]
        self.batches.append(ids)
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(hashlib.sha256("".join(ids).encode()).hexdigest() + "\n")
        for request in reversed(batch):
            result = self._answer(request, ids)
            if isinstance(result, str):
                result = Completion(result, Usage(10, 4, 5))
            if result is not None:
                yield ChatOutcome(request.id, result)

    async def aclose(self) -> None:
        pass


class RemoteEngine(LocalEngine):
    """As if behind a network: rows come one by one, and nothing depends on the others."""

    batched = False

    def __init__(self, answer: Answer | None = None) -> None:
        super().__init__(answer or of_the_request)

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity("remote", "of-the-request", "1", "", "")


def of_the_batch(request: ChatRequest, ids: Sequence[str]) -> str:
    """A text that changes when any request of the batch or their order does."""
    told = [request.messages[-1].content, str(request.seed), *ids]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def of_the_request(request: ChatRequest, _: Sequence[str]) -> str:
    return f"{request.messages[-1].content} {request.seed % 1_000}"


def cut(request: ChatRequest, _: Sequence[str]) -> BadOutput:
    """What an engine says of a reply that reached the length limit."""
    return BadOutput("The reply was cut.", reason="cut_at_length", raw="half a \ud83d", tokens=(10, 4, 50))


class Pool(EnginePool):
    """Opens engines by name."""

    def __init__(self, **engines: Callable[[], Any]) -> None:
        super().__init__(Path("unused"))
        self._makers = engines

    def describe(self, config: Any) -> None:
        """These engines say themselves who they are."""

    def price_names(self, config: Any) -> tuple[str, ...]:
        """Prices stand under what these engines say that they are."""
        return ()

    def open(self, config: Any) -> Any:
        return self._makers[config]()


def context(
    root: Path,
    engines: EnginePool | None = None,
    *,
    node: str = "node",
    seed: int = 0,
    meter: Meter | None = None,
    stop: threading.Event | None = None,
) -> StageContext:
    """A context in the workspace `root`."""
    return StageContext(
        node,
        seed,
        Workspace(root),
        engines or Pool(),
        meter or Meter(),
        EventLog(root / "events.jsonl"),
        stop or threading.Event(),
    )


def notes(root: Path) -> list[str]:
    """What the person at the terminal was told, oldest first."""
    return [event["text"] for event in read_events(root / "events.jsonl") if event["kind"] == "note"]
