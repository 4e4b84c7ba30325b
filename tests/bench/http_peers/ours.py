"""Headwater: every row journalled when it ends, then the journal written as Parquet with its declared schema.

python ours.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from pathlib import Path

from headwater.core.journal import Entry, Journal
from headwater.core.meter import Reading
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Completion, Message, Sampling


def load_arrow() -> None:
    """What writing Parquet takes to import, a third of a second: done while the first calls are on their way."""
    import pyarrow.parquet  # noqa: F401

    from headwater.core.rows import warm_up

    warm_up()


async def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    engine = OpenAIEngine(base_url=base_url, model="fake", max_concurrency=in_flight)
    journal = Journal(folder / "journal.sqlite")
    numbers, sampling = count(), Sampling()

    async def work() -> None:
        while (number := next(numbers)) < calls:
            request = ChatRequest(f"{number:032x}", (Message("user", f"row {number}"),), sampling, number)
            async for outcome in engine.chat([request]):
                assert isinstance(outcome.result, Completion)
                row = {"id": request.id, "text": outcome.result.text}
                usage = outcome.result.usage
                journal.put(Entry(request.id, True, [row], Reading(1, usage.tokens_in, 0, usage.tokens_out)))

    await asyncio.gather(asyncio.to_thread(load_arrow), *(work() for _ in range(in_flight)))
    await engine.aclose()
    import pyarrow as pa
    import pyarrow.parquet as pq

    from headwater.core.rows import schema

    rows = [row for entry in journal.entries(f"{number:032x}" for number in range(calls)) for row in entry.rows]
    pq.write_table(pa.Table.from_pylist(rows, schema(text=pa.string())), folder / "part-00000.parquet")
    journal.delete()
    (folder / "rows.json").write_text(json.dumps(pq.read_metadata(folder / "part-00000.parquet").num_rows))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
