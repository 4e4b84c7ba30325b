"""Run a recipe's graph, stage after stage: in this process (`--direct`) or as a Prefect flow, to the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.core.errors import ConfigError, HeadwaterError, Stopped
from headwater.core.events import EventLog, Listener
from headwater.core.meter import Meter
from headwater.core.store import StageOutput, Workspace, disk_errors
from headwater.core.sweep import sweep
from headwater.flows.graph import Graph, Node
from headwater.flows.plan import check_prices
from headwater.flows.rates import Rate, Rates
from headwater.flows.recipe import Recipe
from headwater.flows.runs import Run, link_dataset, write_atomically
from headwater.llm.registry import price_names
from headwater.stages.base import StageContext
from headwater.stages.engines import EnginePool
from headwater.stages.run import StageResult, find_output, reused, run_stage


@dataclass
class Execution:
    """One run in progress: its recipe, its folder, and what it has made so far."""

    recipe: Recipe
    run: Run
    workspace: Workspace
    listeners: tuple[Listener, ...] = ()
    """Hear every event; may be added to while the run goes on."""
    max_cost: float | None = None
    """Dollars; ConfigError when a server of the recipe has no price, as it would never be used up."""
    max_tokens: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set it to stop the run gracefully: what is in flight ends, everything finished is kept."""
    results: dict[str, StageResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph: Graph = self.recipe.graph()
        try:
            check_prices(self.recipe, self.graph, max_cost=self.max_cost)
        except ConfigError as error:
            self.run.set_state("failed", error=error.what, todo=error.todo)
            raise
        self.meter = Meter(self.recipe.prices, max_cost=self.max_cost, max_tokens=self.max_tokens)
        self.events = EventLog(self.run.events_path, (self._tell,))
        self.engines = EnginePool(self.workspace.cache, self._note)
        self.rates = Rates(self.workspace)

    def context(self, node: Node) -> StageContext:
        return StageContext(
            node.name, self.recipe.seed, self.workspace, self.engines, self.meter, self.events, self.stop
        )

    def inputs(self, node: Node) -> dict[str, StageOutput]:
        return {name: self.results[source].output for name, source in node.inputs.items()}

    def run_node(self, name: str) -> StageResult:
        """Run one node whose inputs are there, and record it in the lineage."""
        node = self.graph[name]
        self.context(node).check()
        tokens, clock = self.meter.total.tokens_out, time.monotonic()
        with node.named():
            result = run_stage(node.stage, self.inputs(node), self.context(node))
        if not result.reused:
            self._measure(node, result, self.meter.total.tokens_out - tokens, time.monotonic() - clock)
        self._record(node, result)
        return result

    def reuse_all(self) -> bool:
        """Take every stage from the store if all of them are there: then there is nothing to orchestrate."""
        for node in self.graph:
            with node.named():
                fingerprint, output = find_output(node.stage, self.inputs(node), self.context(node))
            if output is None:
                self.results.clear()
                return False
            self.results[node.name] = StageResult(output, True, fingerprint)
        for node in self.graph:
            found = self.results[node.name]
            reused(found.output, found.fingerprint, self.context(node))
            self._record(node, found)
        return True

    def outputs(self) -> dict[str, StageOutput]:
        return {name: result.output for name, result in self.results.items()}

    def finish(self) -> None:
        """Lay out the dataset, the card and the report in the run folder."""
        outputs = self.outputs()
        link_dataset(self.run, outputs[self.graph.dataset])
        write_card(self.recipe, self.run, outputs)
        write_report(self.recipe, self.run, outputs)

    def close(self) -> None:
        asyncio.run(self.engines.aclose())
        self.events.close()

    def _note(self, text: str) -> None:
        self.events.emit("note", stage="engines", text=text)

    def _tell(self, event: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(event)

    def _measure(self, node: Node, result: StageResult, tokens_out: int, seconds: float) -> None:
        """Keep how fast the stage was. A resumed stage attempted some rows earlier: then rows per second would lie."""
        configs = list(node.stage.engine_configs().values())
        model = price_names(configs[0])[0] if configs else ""
        resumed = result.output.manifest["meter"]["tokens_out"] > tokens_out
        made = {**{name: found.output.rows for name, found in self.results.items()}, node.name: result.output.rows}
        rows = 0 if resumed else node.size(made)
        self.rates.record(node.stage.name, model, Rate(rows, tokens_out, seconds))

    def _record(self, node: Node, result: StageResult) -> None:
        self.results[node.name] = result
        manifest = result.output.manifest
        self.run.set_lineage(
            {
                **self.run.lineage,
                node.name: {
                    "stage": node.stage.name,
                    "output": result.output.path.name,
                    "fingerprint": result.fingerprint.digest,
                    "reused": result.reused,
                    "rows": manifest["rows"],
                    "parents": dict(node.inputs),
                },
            }
        )


def write_card(recipe: Recipe, run: Run, outputs: Mapping[str, StageOutput]) -> None:
    """Write the data card, keeping what a person added to it."""
    from headwater.data_cards.card import merge_card, render_card

    readme = run.path / "README.md"
    existing = readme.read_text("utf-8") if readme.exists() else None
    write_atomically(readme, merge_card(existing, render_card(recipe.card(run, outputs))))


def write_report(recipe: Recipe, run: Run, outputs: Mapping[str, StageOutput]) -> None:
    """Write the HTML report."""
    from headwater.data_cards.report import render_report

    write_atomically(run.path / "report.html", render_report(recipe.report(run, outputs)))


def execute(execution: Execution, orchestrate: Callable[[Execution], None] | None = None) -> Mapping[str, Any]:
    """Run everything and return the final state. `orchestrate` runs the nodes its own way (Prefect)."""
    run, started = execution.run, time.time()
    execution.events.emit("run_started", run=run.name, stages=[node.name for node in execution.graph])

    def ended(status: str, error: str, todo: str = "") -> None:
        use = asdict(execution.meter.total)
        with contextlib.suppress(OSError):  # on a full disk the error itself matters more than its record
            run.set_state(status, started=started, ended=time.time(), error=error, todo=todo, meter=use)
            execution.events.emit(f"run_{status}", error=error, todo=todo)

    try:
        with disk_errors(f"the run folder {run.path}"):
            sweep(execution.workspace)
            if not execution.reuse_all():
                (orchestrate or _direct)(execution)
            execution.finish()
        state = {
            "started": started,
            "ended": time.time(),
            "rows": execution.outputs()[execution.graph.dataset].rows,
            "reused": sum(result.reused for result in execution.results.values()),
            "stages": len(execution.results),
            "meter": asdict(execution.meter.total),
            "unpriced": sorted(execution.meter.unpriced),
        }
        run.set_state("done", **state)
        execution.events.emit("run_finished", **state)
        return state
    except HeadwaterError as error:
        ended("stopped" if isinstance(error, Stopped) else "failed", error.what, error.todo)
        raise
    except KeyboardInterrupt:
        ended("stopped", "Stopped at once; every finished row is kept.", "Run again to go on.")
        raise
    except BaseException as error:
        ended("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        execution.close()


def _direct(execution: Execution) -> None:
    for node in execution.graph:
        execution.run_node(node.name)
