"""The contract of a stage: a name, a version, a frozen config, declared inputs and output, and one method.

A `TableStage` maps tables to a table; a `RowStage` does slow work for each row. `stages/run.py` runs either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from headwater.core.errors import Stopped
from headwater.core.rows import Reject, Row
from headwater.core.settings import Settings

if TYPE_CHECKING:
    import threading

    import pyarrow as pa

    from headwater.core.events import EventLog
    from headwater.core.meter import Meter
    from headwater.core.store import OutputWriter, StageOutput, Workspace
    from headwater.llm.registry import EngineConfig
    from headwater.llm.types import ChatRequest, Completion
    from headwater.stages.engines import EnginePool

_ROWS_WITHOUT_ENGINE = 64
"""Rows in flight in a row stage that asks no engine."""


def Knob(default: Any, **constraints: Any) -> Any:  # noqa: N802 - reads as a field type, like pydantic's Field
    """A config field that doesn't change rows (concurrency, timeouts, device): stays out of the fingerprint."""
    return Field(default, json_schema_extra={"knob": True}, **constraints)


class StageConfig(Settings):
    """Base of every stage's config."""


def fingerprint_view(config: BaseModel) -> dict[str, Any]:
    """The config as JSON without its knobs, at every depth."""
    view: dict[str, Any] = _without_knobs(config, config.model_dump(mode="json"))
    return view


def _without_knobs(value: Any, view: Any) -> Any:
    """`view` is the JSON of `value`; only `value` knows which of its fields are knobs."""
    if isinstance(value, BaseModel) and isinstance(view, dict):
        fields = type(value).model_fields
        kept = [name for name in view if name in fields and not _is_knob(fields[name])]
        return {name: _without_knobs(getattr(value, name), view[name]) for name in kept}
    if isinstance(value, Mapping) and isinstance(view, dict):
        return {key: _without_knobs(item, view[key]) for key, item in zip(view, value.values(), strict=True)}
    if isinstance(value, list | tuple) and isinstance(view, list):
        return [_without_knobs(item, shown) for item, shown in zip(value, view, strict=True)]
    return view


def _is_knob(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("knob"))


@dataclass(frozen=True)
class StageContext:
    """What a running stage may use besides its inputs."""

    node: str
    """The stage's name within its pipeline, such as `features.anchor`."""
    run_seed: int
    workspace: Workspace
    engines: EnginePool
    meter: Meter
    events: EventLog
    stop: threading.Event
    """Set when the user asked the run to stop."""

    def progress(self, done: int, total: int | None, **fields: Any) -> None:
        """Report progress, and stop here if the user or the budget asked for it (raises Stopped)."""
        self.events.progress(self.node, done, total, **fields)
        self.check()

    def check(self) -> None:
        """Raises Stopped when the user or the budget asked the run to stop."""
        if self.stop.is_set():
            raise Stopped("Stopped as you asked; everything finished is kept.", todo="Run again to go on.")
        self.meter.check()

    def note(self, text: str) -> None:
        """Tell the person at the terminal something worth knowing; also kept in events.jsonl."""
        self.events.emit("note", stage=self.node, text=text)


ConfigT = TypeVar("ConfigT", bound=StageConfig)


class Stage(ABC, Generic[ConfigT]):
    """One step of a pipeline. Subclasses set the class variables and implement the one method of their kind."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised when the same config and inputs give other rows or another schema."""
    inputs: ClassVar[Mapping[str, Sequence[str]]]
    """Input name → the columns it must have; checked before anything runs."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """The declared schema of the rows this stage writes."""

    @property
    def max_reject_share(self) -> float:
        """The largest share of attempted rows that may be rejected before the stage fails."""
        return 1.0

    @property
    def verdicts(self) -> Collection[str]:
        """Reject reasons that are the stage's answer and no fault: `max_reject_share` does not count them."""
        return ()

    @property
    def untried(self) -> Collection[str]:
        """Reject reasons of rows that were left alone on purpose: `max_reject_share` is a share of the others."""
        return ()

    @property
    def may_be_empty(self) -> bool:
        """Whether an output without rows is a result rather than a failure."""
        return False

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        """The engines the stage uses, by the name it asks for; their identities enter the fingerprint."""
        return {}

    def external_inputs(self) -> Mapping[str, Any]:
        """What the stage reads from outside the pipeline, as content hashes or revisions, for the fingerprint."""
        return {}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        """What the stage would cost, from the row counts of its inputs (forecast themselves, if need be)."""
        first = next(iter(rows.values()), 0)
        return Forecast(rows=first)


@dataclass(frozen=True, slots=True)
class Forecast:
    """An estimate made before anything is spent."""

    rows: int
    """Rows that come out."""
    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    model: str = ""
    """The model whose price applies to the tokens."""
    seconds: float | None = None
    """Seconds, where the stage knows better than tokens over a measured rate."""


class TableStage(Stage[ConfigT]):
    """Maps tables to a table: read inputs in frames, write frames, reject rows, note metrics."""

    @abstractmethod
    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        """Write every attempted row to `out`, accepted or rejected."""


class Call(Protocol):
    """What a row stage may do for one row: ask an engine. What it used is metered and journalled with the row."""

    async def chat(self, request: ChatRequest, engine: str = "engine") -> Completion:
        """The completion; a failed request raises its typed error."""
        ...


class RowStage(Stage[ConfigT]):
    """Slow work per row, concurrent and journalled. Its one input is called `rows`."""

    @property
    def concurrency(self) -> int:
        """Rows in flight with engines outside the process: what the widest of them takes; its gate may let in fewer."""
        configs = self.engine_configs()
        return max((configs[name].max_concurrency for name in self.asks), default=_ROWS_WITHOUT_ENGINE)

    @property
    def window(self) -> int:
        """Rows that go together with an engine inside the process. Fixed, because batches decide the last digit."""
        return 128

    @property
    def asks(self) -> Collection[str]:
        """The engines that rows ask. One that only helps (its tokenizer cuts texts) must not decide how rows go out."""
        return self.engine_configs().keys()

    async def open(self, inputs: Mapping[str, StageOutput], context: StageContext) -> None:
        """Read what every row needs (other inputs); called once before the first row."""

    @abstractmethod
    async def process(self, row: Row, call: Call) -> Sequence[dict[str, Any]] | Reject:
        """The rows that `row` becomes (without `id`: it is derived), or why it became none.

        A BadOutput raised here rejects the row; after a TransientError the row is owed and the others go on; any other
        error ends the stage with everything finished kept.
        """
