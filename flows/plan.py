"""What a run would do, found out without running anything: which outputs are there, why not the first, what is left."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from headwater.core.errors import HeadwaterError
from headwater.core.events import EventLog
from headwater.core.meter import Meter
from headwater.core.store import StageOutput, Workspace, nearest_difference
from headwater.flows.graph import Node
from headwater.flows.rates import Rates
from headwater.flows.recipe import Recipe
from headwater.stages.base import Forecast, StageContext
from headwater.stages.engines import EnginePool
from headwater.stages.run import find_output


@dataclass(frozen=True)
class PlannedNode:
    node: Node
    output: StageOutput | None
    """The finished output that would be reused; None when the stage would be made."""
    forecast: Forecast
    seconds: float | None
    """Estimated seconds; None when nothing comparable was measured on this machine yet."""
    dollars: float | None
    """Estimated cost; None when the recipe has no price for the model."""


@dataclass(frozen=True)
class Plan:
    nodes: tuple[PlannedNode, ...]
    why: tuple[str, ...]
    """Parts of the fingerprint by which the first stage to be made differs from its newest earlier output."""
    unsure: str
    """Why it can't be told what would be reused (an engine that can't be asked for its identity), or nothing."""

    @property
    def to_make(self) -> tuple[PlannedNode, ...]:
        return tuple(planned for planned in self.nodes if planned.output is None)


def make_plan(recipe: Recipe, workspace: Workspace) -> Plan:
    """Look up the finished outputs and forecast the rest. Loads no weights and writes nothing."""
    graph = recipe.graph()
    engines = EnginePool(workspace.cache)
    found: dict[str, StageOutput] = {}
    why: list[str] = []
    unsure = ""
    try:
        for node in graph:
            context = _context(node, recipe, workspace, engines)
            inputs = {name: found[source] for name, source in node.inputs.items()}
            fingerprint, output = find_output(node.stage, inputs, context)
            if output is None:
                why = nearest_difference(workspace.stages, node.stage.name, node.name, fingerprint)
                break
            found[node.name] = output
    except HeadwaterError as error:
        if error.exit_code == 2:
            raise
        unsure = f"{error.what} {error.todo}".strip()
    forecasts = graph.forecast({name: output.rows for name, output in found.items()})
    rates = Rates(workspace)
    rows = {name: found[name].rows if name in found else forecast.rows for name, forecast in forecasts.items()}
    planned = tuple(
        PlannedNode(
            node,
            found.get(node.name),
            forecasts[node.name],
            rates.seconds(node.stage.name, forecasts[node.name], node.size(rows)),
            _dollars(recipe, node, forecasts[node.name]),
        )
        for node in graph
    )
    return Plan(planned, tuple(why), unsure)


def _context(node: Node, recipe: Recipe, workspace: Workspace, engines: EnginePool) -> StageContext:
    return StageContext(node.name, recipe.seed, workspace, engines, Meter(), EventLog(), threading.Event())


def _dollars(recipe: Recipe, node: Node, forecast: Forecast) -> float | None:
    """A model inside this process costs nothing per token, unless the recipe says otherwise."""
    price = recipe.prices.get(forecast.model)
    if price is not None:
        return price.dollars(forecast.tokens_in, 0, forecast.tokens_out)
    served = any(config.engine == "openai" for config in node.stage.engine_configs().values())
    return None if served and forecast.calls else 0.0
