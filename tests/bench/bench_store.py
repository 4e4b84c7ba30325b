"""What the store, the journal and the runner cost. Each measurement runs in a process of its own; prints one line each.

    python tests/bench/bench_store.py              all of them
    python tests/bench/bench_store.py million      one of them

million     a million rows through a table stage, and once more out of it as a dataset is written: peak resident memory
reuse       an output of 10,000 rows found again
hashes      the source hash of a stage with its helpers, cold and warm
journal     rows journalled one by one, and in windows of 128
overhead    what the runner adds to a row of an engine that answers at once, the journal included
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "stages"))

MILLION = 1_000_000
MOST_MEMORY_GB = 1.5
MOST_OVERHEAD_MS = 0.1
_FRAME_ROWS = 10_000


def main() -> int:
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as folder:
            MEASURES[sys.argv[1]](Path(folder))
        return 0
    done = [subprocess.run([sys.executable, __file__, name]).returncode for name in MEASURES]
    return max(done)


def million(root: Path) -> None:
    import polars as pl
    from sample_stages import Numbers, NumbersConfig, context

    from headwater.core.rows import row_id, schema
    from headwater.stages.run import run_stage

    text = "A row of a dataset has about this many characters, give or take, and says something different. " * 4

    class Wide(Numbers):
        """A million rows of 400 characters, or those of its input once more."""

        @property
        def output(self) -> Any:
            import pyarrow as pa

            return schema(number=pa.int64(), text=pa.string())

        def run(self, inputs: Mapping[str, Any], out: Any, context: Any) -> None:
            for frame in self._frames(inputs):
                out.write(frame)

        def _frames(self, inputs: Mapping[str, Any]) -> Iterator[pl.DataFrame]:
            if "rows" in inputs:
                yield from inputs["rows"].frames(_FRAME_ROWS)
                return
            for first in range(0, MILLION, _FRAME_ROWS):
                numbers = range(first, first + _FRAME_ROWS)
                ids = [row_id("wide", [], n) for n in numbers]
                yield pl.DataFrame({"id": ids, "number": numbers, "text": [f"{n} {text}" for n in numbers]})

    clock = time.perf_counter()
    made = run_stage(Wide(NumbersConfig(rows=1)), {}, context(root)).output
    again = run_stage(Wide(NumbersConfig(rows=2)), {"rows": made}, context(root)).output
    seconds = time.perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert (again.rows, again.content_hash) == (MILLION, made.content_hash)
    print(f"a million rows, written twice: peak memory {peak:.2f} GB (at most {MOST_MEMORY_GB}), {seconds:.1f} s")
    assert peak < MOST_MEMORY_GB


def reuse(root: Path) -> None:
    from sample_stages import Numbers, NumbersConfig, context

    from headwater.stages.run import run_stage

    run_stage(Numbers(NumbersConfig(rows=10_000)), {}, context(root))
    seconds = _best(lambda: run_stage(Numbers(NumbersConfig(rows=10_000)), {}, context(root)), 20)
    print(f"an output of 10,000 rows found again: {seconds * 1e3:.1f} ms")


def hashes(_: Path) -> None:
    from headwater.core import fingerprint

    module = "headwater.stages.fac.features"
    clock = time.perf_counter()
    fingerprint.source_hash(module)
    cold = time.perf_counter() - clock
    warm = _best(lambda: fingerprint.source_hash(module), 20)
    print(f"source hash of {module}: {cold * 1e3:.0f} ms, then {warm * 1e3:.2f} ms")


def journal(root: Path) -> None:
    from headwater.core.journal import Entry, Journal

    def entry(n: int) -> Entry:
        return Entry(f"{n:032x}", True, [{"id": f"{n:032x}", "text": "x" * 400, "seed": n}])

    rows = 20_000
    with Journal(root / "one.sqlite") as one:
        clock = time.perf_counter()
        for n in range(rows):
            one.put(entry(n))
        single = rows / (time.perf_counter() - clock)
    with Journal(root / "many.sqlite") as many:
        clock = time.perf_counter()
        for first in range(0, rows, 128):
            many.put_together(entry(n) for n in range(first, first + 128))
        together = rows / (time.perf_counter() - clock)
    print(f"journal: {single:,.0f} rows/s one by one, {together:,.0f} rows/s in windows of 128")


def overhead(root: Path) -> None:
    from sample_stages import Ask, AskConfig, LocalEngine, Numbers, NumbersConfig, Pool, RemoteEngine, context

    from headwater.llm.types import ChatRequest, Message, Sampling
    from headwater.stages.run import run_stage

    sampling = Sampling()

    class Bare(Ask):
        """One call per row and nothing of its own."""

        async def process(self, row: Any, call: Any) -> Any:
            completion = await call.chat(ChatRequest(row["id"], (Message("user", "?"),), sampling, 0))
            return [{"number": row["number"], "text": completion.text, "seed": 0}]

    rows = 20_000
    numbers = run_stage(Numbers(NumbersConfig(rows=rows)), {}, context(root)).output
    for kind, engine in (("sliding", RemoteEngine), ("windows", LocalEngine)):
        stage = Bare(AskConfig(concurrency=64, window=128, engine=kind))
        pool = Pool(**{kind: lambda engine=engine: engine(lambda *_: "an answer")})
        clock, cpu = time.perf_counter(), time.process_time()
        run_stage(stage, {"rows": numbers}, context(root, pool))
        wall, used = time.perf_counter() - clock, time.process_time() - cpu
        print(
            f"runner, {kind}: {used / rows * 1e3:.3f} ms of CPU per row (at most {MOST_OVERHEAD_MS}), "
            f"{wall / rows * 1e3:.3f} ms by the clock, from the first row to the published output"
        )


def _best(work: Callable[[], Any], times: int) -> float:
    """Seconds of the quickest of `times` runs."""
    clocks = []
    for _ in range(times):
        clock = time.perf_counter()
        work()
        clocks.append(time.perf_counter() - clock)
    return min(clocks)


MEASURES: Mapping[str, Callable[[Path], None]] = {
    "million": million,
    "reuse": reuse,
    "hashes": hashes,
    "journal": journal,
    "overhead": overhead,
}

if __name__ == "__main__":
    sys.exit(main())
