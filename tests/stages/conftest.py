"""What tests of stages share: a stage run for real, an input made by hand, and a way to import the helper scripts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.core.events import EventLog
from headwater.core.fingerprint import Fingerprint
from headwater.core.meter import Meter
from headwater.core.store import OutputWriter, StageOutput, Workspace
from headwater.stages.base import Stage, StageContext
from headwater.stages.engines import EnginePool
from headwater.stages.run import run_stage

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parent / "llm"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """A stage's context in a workspace of its own, with the engines that recipes name."""
    workspace = Workspace(tmp_path / "workspace")
    return StageContext("node", 0, workspace, EnginePool(workspace.cache), Meter(), EventLog(), threading.Event())


@pytest.fixture
def run(context: StageContext) -> Callable[..., StageOutput]:
    """Runs a stage on its inputs, by name, and returns what it published."""

    def run_one(stage: Stage[Any], inputs: Mapping[str, StageOutput] | None = None) -> StageOutput:
        return run_stage(stage, inputs or {}, context).output

    return run_one


@pytest.fixture
def make_output(context: StageContext) -> Callable[..., StageOutput]:
    """Publishes rows given by hand, with artifacts given as text or bytes, as if a stage of that name had made them."""

    def make(
        name: str,
        schema: pa.Schema,
        rows: Sequence[Mapping[str, Any]],
        artifacts: Mapping[str, str | bytes] | None = None,
    ) -> StageOutput:
        fingerprint = Fingerprint({"stage": name, "rows": str(rows), "artifacts": str(artifacts)})
        out = OutputWriter(context.workspace.output_path(name, fingerprint), schema, f"Stage {name}")
        out.write_rows(rows)
        for artifact, text in (artifacts or {}).items():
            path = out.artifact(artifact)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return out.publish(fingerprint, {"node": name})

    return make
