"""The HTTP engine with its journal against a bare aiohttp client, and against other clients of the field.

    python tests/bench/bench_http.py [--calls 2000] [--rounds 5] [--peers DIR]

Part one: steady rows/s of 2,000 calls, 64 in flight, against a server with 50 ms latency in a process of its own. The
two sides alternate A B A B; printed are medians of the rates and of the ratios within a round. *Bare* posts and parses;
*Headwater* also writes every row into the journal before it counts.

Part two: from process start to a dataset on disk, each side in a fresh process, alternating too. *Headwater* is the
whole of `pipeline run --direct`: recipe, store, stages with their runners, dataset, card and report; *its engine alone*
writes the journal and a Parquet file. Every peer has an environment of its own below `.venv-peers`, or the folder that
`--peers` names, which `make bench` makes; a peer that doesn't run there is skipped, and a line says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import aiohttp

from headwater.core.journal import Entry, Journal
from headwater.core.meter import Reading
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Completion, Message, Sampling

IN_FLIGHT = 64
LATENCY_MS = 50
_PATIENCE_S = 600
_SAMPLING = Sampling()
_HERE = Path(__file__).resolve().parent
_SERVER = _HERE.parent / "llm" / "fault_server.py"
_PEERS = _HERE / "http_peers"
_OURS = {"bare aiohttp": "bare.py", "Headwater": "pipeline_run.py", "its engine alone": "ours.py"}
_THEIRS = {
    "openai SDK": ("clients", "openai_peer.py"),
    "datatrove": ("clients", "datatrove_peer.py"),
    "curator": ("curator", "curator_peer.py"),
    "DataDesigner": ("data-designer", "data_designer_peer.py"),
    "distilabel": ("distilabel", "distilabel_peer.py"),
}
"""Peer → its environment and its script."""
_QUIET = {
    "PYTHONWARNINGS": "ignore",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TELEMETRY_ENABLED": "false",
    "NEMO_TELEMETRY_ENABLED": "false",
}
"""For every side: nobody's telemetry is to leave the machine."""


@dataclass(frozen=True)
class Taken:
    """What one side took."""

    seconds: float
    cpu_seconds: float


class Unfinished(Exception):  # noqa: N818 - a peer that does not run here is no fault
    """A side that left no whole dataset, and why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="where the peers' venvs lie")
    given = parser.parse_args()
    with server() as base_url:
        steady(base_url, given.calls, given.rounds)
        whole(base_url, given.calls, given.rounds, given.peers)


def steady(base_url: str, calls: int, rounds: int) -> None:
    """Print steady rows/s of both sides."""
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
        _print_line(name, rate, rates["bare aiohttp"], f"{statistics.median(cpu[name]):.2f} s CPU")


def whole(base_url: str, calls: int, rounds: int, peers: Path) -> None:
    """Print rows/s from process start to a dataset on disk, each side in its own process."""
    sides = {name: [sys.executable, str(_PEERS / script)] for name, script in _OURS.items()}
    for name, (environment, script) in _THEIRS.items():
        python = peers / environment / "bin" / "python"
        if python.exists():
            sides[name] = [str(python), str(_PEERS / script)]
        else:
            print(f"skipped {name}: there is no environment {python.parent.parent}; `make bench` makes it")
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in list(sides.items()):
            try:
                taken[name].append(_run(command, base_url, calls))
            except Unfinished as why:
                print(f"skipped {name}: {why}")
                del sides[name], taken[name]
    print(f"\nfrom process start to dataset on disk, {calls} calls, {rounds} rounds")
    rates = {name: [calls / one.seconds for one in found] for name, found in taken.items()}
    for name, rate in rates.items():
        cpu = statistics.median(one.cpu_seconds for one in taken[name])
        rest = f"{calls / statistics.median(rate):.2f} s, {cpu:.2f} s CPU"
        _print_line(name, rate, rates["bare aiohttp"], rest)


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
    # Its stderr goes nowhere: curator asks without a message first, to learn limits, which the server doesn't expect.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
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


def _run(command: list[str], base_url: str, calls: int) -> Taken:
    """Run one side in an empty folder until its dataset of `calls` rows is on disk, counted and all.

    Raises Unfinished when it ends in any other way.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = [*command, base_url, str(calls), str(IN_FLIGHT), folder]
        used, began = _children_cpu(), time.time()
        environment = {**os.environ, **_QUIET, "HOME": folder}  # some leave files in one's home
        try:
            subprocess.run(told, check=True, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment)
        except subprocess.CalledProcessError as error:
            raise Unfinished((error.stderr.strip().splitlines() or ["no word"])[-1]) from error
        except subprocess.TimeoutExpired as error:
            raise Unfinished(f"no dataset within {_PATIENCE_S} s") from error
        count_file = Path(folder) / "rows.json"
        taken = Taken(count_file.stat().st_mtime - began, _children_cpu() - used)
        rows = json.loads(count_file.read_text())
    if rows != calls:
        raise Unfinished(f"it left {rows} rows of {calls}")
    return taken


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _print_line(name: str, rates: list[float], base: list[float], rest: str) -> None:
    """The median rate, and the median of the rounds' ratios: what slows a round slows both sides."""
    share = statistics.median(mine / theirs for mine, theirs in zip(rates, base, strict=True))
    print(f"{name:<24}{statistics.median(rates):8.0f} rows/s   {share:5.2f} of bare   {rest}")


if __name__ == "__main__":
    main()
