"""Run a pipeline as a Prefect flow: one task per stage, whose arguments are names, never data.

Prefect neither caches nor stores results here; the manifests of the store decide what is done. Stages run in this
process in the order of the graph, so the bytes are those of a direct run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError, PermanentError, Stopped
from headwater.flows.prefect_artifacts import ProgressArtifacts, publish_artifacts
from headwater.flows.prefect_server import local_api, quiet_environment

if TYPE_CHECKING:
    from headwater.flows.execute import Execution

_API_URL = "PREFECT_API_URL"


def run_with_prefect(execution: Execution) -> None:
    """Run every node of `execution` under Prefect; for `flows.execute.execute`.

    Reports to the server named by PREFECT_API_URL when the user set it, otherwise to an API of our own that lives as
    long as the run. Raises the stage's own typed error, or PermanentError when Prefect itself fails.
    """
    home = execution.workspace.prefect
    theirs = os.environ.get(_API_URL)
    os.environ.update(quiet_environment(home))
    if theirs:
        _run_flow(execution, theirs, watched=True)
        return
    first = "" if (home / "prefect.db").exists() else "; the first time takes longer, it creates its database"
    execution.events.emit("note", stage="prefect", text=f"starting its local API{first}")
    with local_api(home) as api:
        _import_prefect()
        api.wait_ready()
        _run_flow(execution, api.url, watched=False)


def _import_prefect() -> None:
    """Load what a flow needs while the server child is still starting."""
    import prefect.client.orchestration
    import prefect.flow_engine
    import prefect.task_engine  # noqa: F401 - loaded for its effect


def _run_flow(execution: Execution, url: str, *, watched: bool) -> None:
    """Run the flow against the API at `url`; `watched`: somebody may be looking at that server's UI."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_API_URL, temporary_settings

    failures: list[BaseException] = []
    handlers = _current_handlers()

    def run_stage(node: str) -> Any:
        try:
            execution.run_node(node)
        except Exception as error:
            failures.append(error)
            return _ended(error)
        return None

    stage = task(task_run_name="{node}", cache_policy=NO_CACHE, persist_result=False, retries=0)(run_stage)

    def run_stages(run: str) -> Any:
        with _handled_by(handlers), ProgressArtifacts(execution) if watched else contextlib.nullcontext():
            for node in execution.graph:
                state = stage.with_options(name=node.stage.name)(node.name, return_state=True)
                if failures or not state.is_completed():
                    return state
            publish_artifacts(execution)
        return None

    names = {"name": execution.run.pipeline, "flow_run_name": execution.run.path.name}
    pipeline = flow(**names, persist_result=False, retries=0)(run_stages)
    final: Any = None
    cause: Exception | None = None
    with temporary_settings({PREFECT_API_URL: url}), _quiet_loggers():
        try:
            final = pipeline(execution.run.name, return_state=True)
        except Exception as error:
            cause = error
    if failures:
        raise failures[0]
    if final is None or not final.is_completed():
        where = f"the server at {url}" if watched else "its local API"
        raise PermanentError(
            f"Prefect could not run the flow against {where}: {cause or final.message}.",
            todo="Check the server, or use `--direct`: it runs the same stages without Prefect.",
        ) from cause


def _ended(error: Exception) -> Any:
    """The Prefect state of a stage that ended early. No exception passes through Prefect, which would print it."""
    from prefect.states import Cancelled, Failed

    message = error.what if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
    return Cancelled(message=message) if isinstance(error, Stopped) else Failed(message=message)


@contextlib.contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Prefect's reports of our own failures, tracebacks included, would repeat what the command says in a sentence."""
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.events")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _current_handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


@contextlib.contextmanager
def _handled_by(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Keep the handlers of the command: Prefect puts its own SIGTERM handler in for the length of a flow."""
    if not _in_main_thread():
        yield
        return
    theirs = {number: signal.signal(number, handler) for number, handler in handlers.items() if handler is not None}
    try:
        yield
    finally:
        for number, handler in theirs.items():
            signal.signal(number, handler)
