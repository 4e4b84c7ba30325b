"""How fast stages ran on this machine: measured in every run, kept in the workspace, used to forecast seconds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.core.store import Workspace
from headwater.flows.runs import write_atomically
from headwater.llm.registry import EMBEDDED, ENGINES, EngineConfig
from headwater.stages.base import Forecast, RowStage, Stage

_MIN_SECONDS = 0.05
"""Below this a measurement says more about the clock than about the stage."""

# Rough rates for a workspace where nothing was measured yet; those of the embedded model are of one CPU core.
_WRITTEN_PER_CORE = 80.0
"""Tokens per second in full batches."""
_READ_PER_CORE = 1_000.0
"""Tokens per second."""
_TOKENS_PER_ROW = 40
"""Read by a stage that forecasts none."""
_CORE_SECONDS = {"sae": 100.0}
"""What a stage computes besides reading its rows, by its name."""
_MOST_CORES = 16
"""More of them hardly help a model that small."""
_CALL_SECONDS = 2.0
"""Of a call to a server."""
_ROWS_PER_SECOND = 2_000.0
"""Of a stage that uses no model."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The last time a stage was made: what it did and how long it took."""

    rows: int
    """Rows of its largest input, or rows made when it has none."""
    tokens_out: int
    seconds: float


class Rates:
    """Last measured rates by stage and model."""

    def __init__(self, workspace: Workspace) -> None:
        self._path = workspace.cache / "rates.json"
        try:
            known: Mapping[str, Mapping[str, Any]] = json.loads(self._path.read_text("utf-8"))
            self._known = {key: Rate(**value) for key, value in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._known = {}

    def record(self, stage: str, model: str, rate: Rate) -> None:
        """Keep a measurement; the newest wins."""
        if rate.seconds < _MIN_SECONDS or not (rate.rows or rate.tokens_out):
            return
        self._known[_key(stage, model)] = rate
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps({key: asdict(value) for key, value in self._known.items()}, indent=1))

    def tokens_per_second(self, model: str) -> float | None:
        """Tokens written per second by `model`, over all stages measured with it; None when there are none."""
        rates = [rate for key, rate in self._known.items() if key.endswith(_key("", model)) and rate.tokens_out]
        seconds = sum(rate.seconds for rate in rates)
        return sum(rate.tokens_out for rate in rates) / seconds if model and seconds else None

    def seconds(self, stage: str, forecast: Forecast, rows: int) -> float | None:
        """Estimated seconds of a stage whose largest input has `rows`; None when nothing comparable was measured."""
        if forecast.seconds is not None:
            return forecast.seconds
        own = self._known.get(_key(stage, forecast.model))
        if forecast.tokens_out:
            rate = own.tokens_out / own.seconds if own and own.tokens_out else self.tokens_per_second(forecast.model)
            return forecast.tokens_out / rate if rate else None
        return rows * own.seconds / own.rows if own and own.rows else None


def rough_seconds(stage: Stage[Any], forecast: Forecast, rows: int) -> float | None:
    """A guess at the seconds of a stage of which nothing was measured; its order of magnitude is what may be right.

    None for a model in this process that isn't the embedded one: its size and what runs it make all the difference.
    """
    engines = stage.engine_configs()
    asked = [engines[name] for name in engines if not isinstance(stage, RowStage) or name in stage.asks]
    if not asked:
        return rows / _ROWS_PER_SECOND
    config = asked[0]
    if not ENGINES[config.engine].local:
        at_once = min(config.max_concurrency, stage.concurrency if isinstance(stage, RowStage) else 1)
        return math.ceil(forecast.calls / at_once) * _CALL_SECONDS
    if config.engine != EMBEDDED:
        return None
    written = forecast.tokens_out / _WRITTEN_PER_CORE
    read = 0.0 if written else (forecast.tokens_in or rows * _TOKENS_PER_ROW) / _READ_PER_CORE
    return (_CORE_SECONDS.get(stage.name, 0.0) + written + read) / _cores(config)


def _cores(config: EngineConfig) -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(config.threads or there, there, _MOST_CORES)


def _key(stage: str, model: str) -> str:
    return f"{stage}|{model}"
