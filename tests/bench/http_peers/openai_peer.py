"""The openai SDK, as its documentation uses it: one AsyncOpenAI, a semaphore's worth of workers, JSON lines.

python openai_peer.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from pathlib import Path

from openai import AsyncOpenAI


async def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    numbers = count()
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=6) as client:
        with (folder / "rows.jsonl").open("w") as out:

            async def work() -> None:
                while (number := next(numbers)) < calls:
                    reply = await client.chat.completions.create(
                        model="fake",
                        messages=[{"role": "user", "content": f"row {number}"}],
                        seed=number,
                        max_tokens=256,
                    )
                    out.write(json.dumps({"id": number, "text": reply.choices[0].message.content}) + "\n")

            await asyncio.gather(*(work() for _ in range(in_flight)))
    with (folder / "rows.jsonl").open() as file:
        (folder / "rows.json").write_text(json.dumps(sum(1 for _ in file)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
