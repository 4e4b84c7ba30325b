"""`pipeline run`: one execution with its display, its signals and its summary."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headwater.core.store import Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.plan import check_prices
from headwater.flows.runs import create_run
from headwater.pipelines.failures import concerning
from headwater.pipelines.progress import open_display
from headwater.pipelines.summary import print_summary

if TYPE_CHECKING:
    from headwater.flows.graph import Graph
    from headwater.flows.recipe import Recipe

_STOPPED = 130
_SHOW_CURSOR = b"\x1b[?25h\n"


def run_recipe(
    recipe: Recipe,
    workspace: Workspace,
    *,
    direct: bool = False,
    max_cost: float | None = None,
    max_tokens: int | None = None,
) -> None:
    """Run `recipe` in a new run folder, show its progress on stderr and its summary on stdout.

    Raises what the run raises; `Stopped` after SIGINT, SIGTERM or a spent budget.
    """
    graph = recipe.graph()
    check_prices(recipe, graph, max_cost=max_cost)
    _check_servers(graph, workspace)
    run = create_run(workspace, recipe.pipeline, recipe.resolved())
    concerning(run.path)
    display = open_display()
    execution = Execution(recipe, run, workspace, (display,), max_cost=max_cost, max_tokens=max_tokens)
    with display, _stopping(execution):
        state = execute(execution, None if direct else _with_prefect)
    print_summary(execution, state)


def _check_servers(graph: Graph, workspace: Workspace) -> None:
    """Raises ConfigError for an absent key or a wrong address now, not after the hours until its stage is reached."""
    from headwater.llm.registry import ENGINES, open_engine

    for config in {config for node in graph for config in node.stage.engine_configs().values()}:
        if not ENGINES[config.engine].local:
            open_engine(config, cache=workspace.cache)  # connects when it is first used


def _with_prefect(execution: Execution) -> None:
    from headwater.flows.prefect_flow import run_with_prefect

    run_with_prefect(execution)


@contextlib.contextmanager
def _stopping(execution: Execution) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops gracefully, the second at once; every finished row is kept either way."""

    def stop(number: int, _frame: Any) -> None:
        if execution.stop.is_set():
            execution.run.set_state("stopped", error="Stopped at once.", todo="Run again to go on.")
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            os._exit(_STOPPED)
        execution.stop.set()
        threading.Thread(target=_announce, args=(execution,), daemon=True).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(execution: Execution) -> None:
    """Said by a thread of its own: the handler may have interrupted the display in the middle of a write."""
    execution.events.emit(
        "note", stage="stopping", text="finishing what is in flight and keeping everything; once more stops at once"
    )
