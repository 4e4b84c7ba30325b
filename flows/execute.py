"""Run a recipe's graph, stage after stage, in this process (`--direct`) or as a Prefect flow: the same bytes either way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.core.events import EventLog, Listener
from headwater.core.meter import Meter
from headwater.core.store import StageOutput, Workspace
from headwater.data_cards.card import merge_card, render_card
from headwater.data_cards.report import render_report
from headwater.flows.graph import Graph, Node
from headwater.flows.recipe import Recipe
from headwater.flows.runs import Run, link_dataset, write_atomically
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
    max_cost: float | None = None
    max_tokens: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    results: dict[str, StageResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph: Graph = self.recipe.graph()
        self.engines = EnginePool(self.workspace.cache)
        self.meter = Meter(self.recipe.prices, max_cost=self.max_cost, max_tokens=self.max_tokens)
        self.events = EventLog(self.run.events_path, self.listeners)

    def context(self, node: Node) -> StageContext:
        return StageContext(
            node.name, self.recipe.seed, self.workspace, self.engines, self.meter, self.events, self.stop
        )

    def inputs(self, node: Node) -> dict[str, StageOutput]:
        return {name: self.results[source].output for name, source in node.inputs.items()}

    def run_node(self, name: str) -> StageResult:
        """Run one node whose inputs are there, and record it in the lineage."""
        node = self.graph[name]
        result = run_stage(node.stage, self.inputs(node), self.context(node))
        self._record(node, result)
        return result

    def reuse_all(self) -> bool:
        """Take every stage from the store if all of them are there: then there is nothing to orchestrate."""
        for node in self.graph:
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
        readme = self.run.path / "README.md"
        existing = readme.read_text("utf-8") if readme.exists() else None
        write_atomically(readme, merge_card(existing, render_card(self.recipe.card(self.run, outputs))))
        write_atomically(self.run.path / "report.html", render_report(self.recipe.report(self.run, outputs)))

    def close(self) -> None:
        asyncio.run(self.engines.aclose())
        self.events.close()

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


def execute(execution: Execution, orchestrate: Callable[[Execution], None] | None = None) -> Mapping[str, Any]:
    """Run everything and return the final state. `orchestrate` runs the nodes its own way (Prefect)."""
    run, started = execution.run, time.time()
    execution.events.emit(
        "run_started", run=f"{run.pipeline}/{run.path.name}", stages=[n.name for n in execution.graph]
    )
    try:
        if not execution.reuse_all():
            (orchestrate or _direct)(execution)
        execution.finish()
        state = {
            "started": started,
            "ended": time.time(),
            "rows": execution.outputs()[execution.graph.dataset].rows,
            "reused": sum(result.reused for result in execution.results.values()),
            "stages": len(execution.results),
            "unpriced": sorted(execution.meter.unpriced),
        }
        run.set_state("done", **state)
        execution.events.emit("run_finished", **state)
        return state
    except HeadwaterError as error:
        status = "stopped" if error.exit_code == 130 else "failed"
        run.set_state(status, started=started, ended=time.time(), error=error.what, todo=error.todo)
        execution.events.emit(f"run_{status}", error=error.what, todo=error.todo)
        raise
    except BaseException as error:
        run.set_state("failed", started=started, ended=time.time(), error=f"{type(error).__name__}: {error}", todo="")
        raise
    finally:
        execution.close()


def _direct(execution: Execution) -> None:
    for node in execution.graph:
        execution.run_node(node.name)
