"""What a run would do, found out without running anything: which outputs are there, why not the first, what is left."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.events import EventLog
from headwater.core.meter import Meter, find_price
from headwater.core.store import StageOutput, Workspace, nearest_difference
from headwater.flows.graph import Graph, Node
from headwater.flows.rates import Rates, rough_seconds
from headwater.flows.recipe import Recipe
from headwater.flows.suggest import did_you_mean
from headwater.llm.registry import ENGINES, price_names
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
    """Estimated seconds; None when nothing comparable was measured on this machine yet, and no guess is worth much."""
    dollars: float | None
    """Estimated cost; None when the recipe has no price for the model."""
    rough: bool = False
    """Whether `seconds` rests on no measurement of this machine."""


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
    check_prices(recipe, graph)
    engines = EnginePool(workspace.cache)
    found: dict[str, StageOutput] = {}
    why: list[str] = []
    unsure = ""
    try:
        for node in graph:
            context = _context(node, recipe, workspace, engines)
            inputs = {name: found[source] for name, source in node.inputs.items()}
            with node.named():
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
        _planned(recipe, node, found.get(node.name), forecasts[node.name], size=node.size(rows), rates=rates)
        for node in graph
    )
    return Plan(planned, tuple(why), unsure)


def check_prices(recipe: Recipe, graph: Graph, *, max_cost: float | None = None) -> None:
    """Raises ConfigError for a price that no engine of the recipe goes by, as no budget would ever count it; and for a
    budget in dollars with a server that has no price, as nothing would ever be charged to it.
    """
    configs = [config for node in graph for config in node.stage.engine_configs().values()]
    known = sorted({name for config in configs for name in price_names(config)})
    for name in recipe.prices:
        if name not in known:
            there = f"Names of this recipe's engines: {', '.join(known)}." if known else "This recipe asks no engine."
            raise ConfigError(
                f"Key 'prices' holds {name!r}, which no engine of the recipe is called.",
                todo=f"{did_you_mean(name, known)}{there}",
            )
    if max_cost is None:
        return
    for config in configs:
        if not ENGINES[config.engine].local and find_price(recipe.prices, price_names(config)) is None:
            raise ConfigError(
                f"A budget of ${max_cost:g} can't be kept: key 'prices' has no price for {config.model!r}.",
                todo="Add its dollars per million tokens, `input` and `output` (0 where it costs nothing); or limit "
                "tokens instead of dollars.",
            )


def _planned(
    recipe: Recipe, node: Node, output: StageOutput | None, forecast: Forecast, *, size: int, rates: Rates
) -> PlannedNode:
    configs = list(node.stage.engine_configs().values())
    if configs and not forecast.model:
        forecast = replace(forecast, model=price_names(configs[0])[0])  # measurements stand under it
    seconds = rates.seconds(node.stage.name, forecast, size)
    rough = None if seconds is not None else rough_seconds(node.stage, forecast, size)
    return PlannedNode(
        node,
        output,
        forecast,
        rough if seconds is None else seconds,
        _dollars(recipe, node, forecast),
        rough=rough is not None,
    )


def _context(node: Node, recipe: Recipe, workspace: Workspace, engines: EnginePool) -> StageContext:
    return StageContext(node.name, recipe.seed, workspace, engines, Meter(), EventLog(), threading.Event())


def _dollars(recipe: Recipe, node: Node, forecast: Forecast) -> float | None:
    """A model inside this process costs nothing per token, unless the recipe says otherwise."""
    configs = list(node.stage.engine_configs().values())
    asked = [config for config in configs if forecast.model in price_names(config)]
    names = price_names(asked[0]) if asked else (forecast.model,)
    price = find_price(recipe.prices, names)
    if price is not None:
        return price.dollars(forecast.tokens_in, 0, forecast.tokens_out)
    served = any(not ENGINES[config.engine].local for config in configs)
    return None if served and forecast.calls else 0.0
