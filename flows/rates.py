"""How fast stages ran on this machine: measured in every run, kept in the workspace, used to forecast seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.core.store import Workspace
from headwater.flows.runs import write_atomically
from headwater.stages.base import Forecast

_MIN_SECONDS = 0.05
"""Below this a measurement says more about the clock than about the stage."""


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


def _key(stage: str, model: str) -> str:
    return f"{stage}|{model}"
