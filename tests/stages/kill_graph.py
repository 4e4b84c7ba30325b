"""A small graph of several stages, to be killed: numbers → asked of a server and of an engine in the process → total.

    python kill_graph.py run WORKSPACE BASE_URL        runs it once
    python kill_graph.py serve                         runs it once per line "WORKSPACE BASE_URL" on stdin, each time
                                                       in a child of its own, and prints "started PID", "ended STATUS"

`serve` spares a test that kills many runs the second that imports take.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

from sample_stages import Ask, AskConfig, LocalEngine, Numbers, NumbersConfig, Pool, Total, TotalConfig, context

from headwater.core.store import StageOutput
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatOutcome, ChatRequest
from headwater.stages.run import run_stage

ROWS = 32
_BATCH_SECONDS = 0.02


class SlowLocalEngine(LocalEngine):
    """Takes as long for a batch as a small model would, so that kills meet it at work."""

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        await asyncio.sleep(_BATCH_SECONDS)
        async for outcome in super().chat(requests):
            yield outcome


def run_graph(root: Path, base_url: str) -> StageOutput:
    """Run all stages in the workspace `root`; batches of the local engine are noted in `batches.txt`."""
    root.mkdir(parents=True, exist_ok=True)
    pool = Pool(
        far=lambda: OpenAIEngine(base_url=base_url, model="fake", max_concurrency=8),
        near=lambda: SlowLocalEngine(batches=root / "batches.txt"),
    )
    numbers = run_stage(Numbers(NumbersConfig(rows=ROWS)), {}, context(root, node="numbers")).output
    asked = {
        name: run_stage(
            Ask(AskConfig(engine=name, calls=2, window=8)), {"rows": numbers}, context(root, pool, node=f"ask.{name}")
        ).output
        for name in ("far", "near")
    }
    return run_stage(Total(TotalConfig()), asked, context(root, node="total")).output


def _serve() -> None:
    import polars
    import pyarrow.parquet

    import headwater.stages.row_runner  # noqa: F401 - the children shall find everything loaded

    polars.Series([0])
    pyarrow.array([0])
    for line in sys.stdin:
        root, base_url = line.split()
        pid = os.fork()
        if pid == 0:
            run_graph(Path(root), base_url)
            os._exit(0)
        print("started", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", status, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve()
    else:
        print(run_graph(Path(sys.argv[2]), sys.argv[3]).path)
