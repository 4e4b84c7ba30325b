"""What a person sees of a run in the UI of their Prefect server: progress of each stage, a table of counts, the report.

Called from inside a flow, so that the artifacts belong to its run.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

if TYPE_CHECKING:
    from headwater.flows.execute import Execution

_EVERY_SECONDS = 10.0


def publish_artifacts(execution: Execution) -> None:
    """A table of counts and a link to the report."""
    from prefect.artifacts import create_link_artifact, create_table_artifact

    rows = []
    for name, result in execution.results.items():
        manifest = result.output.manifest
        rows.append({"stage": name, "reused": result.reused, **manifest["counts"], "rows": manifest["rows"]})
    key = artifact_key(execution.run.pipeline)
    create_table_artifact(table=rows, key=f"{key}-counts", description=f"Rows per stage of {execution.run.name}")
    report = (execution.run.path / "report.html").resolve()
    create_link_artifact(link=report.as_uri(), link_text="report.html", key=f"{key}-report")


class ProgressArtifacts:
    """Hears the progress events of a run and brings them to Prefect every 10 s, from a thread of its own.

    A server that does not answer costs progress, never the run.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._key = artifact_key(execution.run.pipeline)
        self._latest: dict[str, float] = {}
        self._published: dict[str, tuple[UUID, float]] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._execution.listeners = (*self._execution.listeners, self)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._execution.listeners = tuple(heard for heard in self._execution.listeners if heard is not self)
        self._over.set()
        self._thread.join(_EVERY_SECONDS)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "progress" and event["total"]:
            self._latest[event["stage"]] = 100.0 * event["done"] / event["total"]

    def _work(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        for stage, percent in list(self._latest.items()):
            there, before = self._published.get(stage, (None, -1.0))
            if percent == before:
                continue
            try:
                if there is None:
                    made = create_progress_artifact(
                        percent, key=f"{self._key}-{artifact_key(stage)}", description=stage
                    )
                    self._published[stage] = (UUID(str(made)), percent)
                else:
                    update_progress_artifact(there, percent)
                    self._published[stage] = (there, percent)
            except Exception:  # whatever the server or its client does, the run goes on
                return


def artifact_key(name: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
