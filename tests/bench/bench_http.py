"""The HTTP engine with its journal against a bare aiohttp client, and against other clients of the field.

    python tests/bench/bench_http.py [--calls 2000] [--rounds 5] [--peers DIR]

Part one: steady rows/s of 2,000 calls, 64 in flight, against a server with 50 ms latency in a process of its own. The
two sides alternate A B A B; medians and their ratio are printed. *Bare* posts and parses; *Headwater* also writes every
row into the journal before it counts.

Part two: from process start to a dataset on disk, each side in a fresh process, alternating too. The peers run in a
environment of their own, `.venv-peers` unless `--peers` names another: a venv with `openai`, `datatrove`, `orjson`,
`aiofiles`, `aiosqlite` and `httpx`, which `make bench` makes; a peer that doesn't run there is skipped, and the line
says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import aiohttp

from headwater.core.journal import Entry, Journal
from headwater.core.meter import Reading
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Completion, Message, Sampling

IN_FLIGHT = 64
LATENCY_MS = 50
_SAMPLING = Sampling()
_HERE = Path(__file__).resolve().parent
_SERVER = _HERE.parent / "llm" / "fault_server.py"
_PEERS = _HERE / "http_peers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="a venv with openai and datatrove")
    given = parser.parse_args()
    with server() as base_url:
        steady(base_url, given.calls, given.rounds)
        whole(base_url, given.calls, given.rounds, given.peers)


def steady(base_url: str, calls: int, rounds: int) -> float:
    """Print steady rows/s of both sides; return Headwater's share of the bare client's."""
    sides = {"bare aiohttp": bare, "Headwater with journal": ours}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            used = time.process_time()
            rates[name].append(calls / asyncio.run(side(base_url, calls)))
            cpu[name].append(time.process_time() - used)
    print(f"\nsteady, {calls} calls, {IN_FLIGHT} in flight, {LATENCY_MS} ms, {rounds} rounds A B A B")
    for name, rate in rates.items():
        _print_line(name, statistics.median(rate), rates["bare aiohttp"], f"{statistics.median(cpu[name]):.2f} s CPU")
    return statistics.median(rates["Headwater with journal"]) / statistics.median(rates["bare aiohttp"])


def whole(base_url: str, calls: int, rounds: int, peers: Path) -> None:
    """Print rows/s from process start to a dataset on disk, each side in its own process."""
    sides = {"bare aiohttp": [sys.executable, _PEERS / "bare.py"], "Headwater": [sys.executable, _PEERS / "ours.py"]}
    python = peers / "bin" / "python"
    if not python.exists():
        print(f"skipped the peers: there is no environment {peers}; `make bench` makes .venv-peers")
    else:
        sides |= {
            "openai SDK": [python, _PEERS / "openai_peer.py"],
            "datatrove": [python, _PEERS / "datatrove_peer.py"],
        }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in list(sides.items()):
            try:
                rates[name].append(calls / _run(command, base_url, calls))
            except subprocess.CalledProcessError as error:
                print(f"skipped {name}: {(error.stderr.strip().splitlines() or ['no word'])[-1]}")
                del sides[name], rates[name]
    print(f"\nfrom process start to dataset on disk, {calls} calls, {rounds} rounds")
    for name, rate in rates.items():
        _print_line(name, statistics.median(rate), rates["bare aiohttp"], f"{calls / statistics.median(rate):.2f} s")


async def bare(base_url: str, calls: int) -> float:
    """Seconds for `calls` calls with aiohttp alone."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def one(number: int) -> None:
            async with session.post(f"{base_url}/chat/completions", json=_body(number)) as response:
                reply = await response.json()
                assert reply["choices"][0]["message"]["content"]

        return await _timed(calls, one)


async def ours(base_url: str, calls: int) -> float:
    """Seconds for `calls` calls with the engine, every row journalled, called as a row stage calls it."""
    engine = OpenAIEngine(base_url=base_url, model="fake", max_concurrency=IN_FLIGHT)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.sqlite") as journal:

        async def one(number: int) -> None:
            async for outcome in engine.chat([_request(number)]):
                assert isinstance(outcome.result, Completion)
                usage = outcome.result.usage
                reading = Reading(calls=1, tokens_in=usage.tokens_in, tokens_out=usage.tokens_out)
                row = {"id": outcome.request_id, "text": outcome.result.text}
                journal.put(Entry(outcome.request_id, True, [row], reading))

        seconds = await _timed(calls, one)
        assert len(journal.keys()) == calls
        await engine.aclose()
    return seconds


@contextmanager
def server() -> Iterator[str]:
    """The base URL of a fault server in a process of its own, which ends with the block."""
    command = [sys.executable, str(_SERVER), "--latency-ms", str(LATENCY_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


async def _timed(calls: int, one: Callable[[int], Awaitable[None]]) -> float:
    numbers = count()

    async def work() -> None:
        while (number := next(numbers)) < calls:
            await one(number)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


def _request(number: int) -> ChatRequest:
    return ChatRequest(f"{number:032x}", (Message("user", f"row {number}"),), _SAMPLING, number)


def _body(number: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"row {number}"}]
    return {"model": "fake", "messages": messages, "seed": number, "temperature": 0.8, "top_p": 0.9, "max_tokens": 256}


def _run(command: list[object], base_url: str, calls: int) -> float:
    """Seconds from the start of a process until its dataset of `calls` rows is on disk, counted and all."""
    with tempfile.TemporaryDirectory() as folder:
        told = [*map(str, command), base_url, str(calls), str(IN_FLIGHT), folder]
        began = time.time()
        subprocess.run(told, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        count_file = Path(folder) / "rows.json"
        seconds = count_file.stat().st_mtime - began
        rows = json.loads(count_file.read_text())
    if rows != calls:
        raise SystemExit(f"{command[1]} left {rows} rows of {calls}")
    return seconds


def _print_line(name: str, rate: float, base: list[float], rest: str) -> None:
    print(f"{name:<24}{rate:8.0f} rows/s   {rate / statistics.median(base):5.2f} of bare   {rest}")


if __name__ == "__main__":
    main()
