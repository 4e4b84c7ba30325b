"""aiohttp alone: no journal, no retries; one JSON line per reply.

python bare.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from pathlib import Path

import aiohttp


async def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    numbers = count()
    connector = aiohttp.TCPConnector(limit=in_flight)
    async with aiohttp.ClientSession(connector=connector) as session:
        with (folder / "rows.jsonl").open("w") as out:

            async def work() -> None:
                while (number := next(numbers)) < calls:
                    messages = [{"role": "user", "content": f"row {number}"}]
                    body = {"model": "fake", "messages": messages, "seed": number, "max_tokens": 256}
                    async with session.post(f"{base_url}/chat/completions", json=body) as response:
                        reply = await response.json()
                    text = reply["choices"][0]["message"]["content"]
                    out.write(json.dumps({"id": number, "text": text}) + "\n")

            await asyncio.gather(*(work() for _ in range(in_flight)))
    with (folder / "rows.jsonl").open() as file:
        (folder / "rows.json").write_text(json.dumps(sum(1 for _ in file)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
