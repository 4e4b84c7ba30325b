"""SIGKILL at any instant loses at most the calls in flight, repeats no finished row and changes no byte."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import kill_graph
import polars as pl
import pytest
from fault_server import Body, FaultServer, Plan, key_of, reply_to

from headwater.core.journal import Journal
from headwater.core.rows import row_id
from headwater.core.store import load_output

KILLS = 20
_PLAN = Plan(latency_s=0.01, shares={"cut": 0.05})
_SCRIPT = Path(__file__).parent / "kill_graph.py"
_NUMBERS = {row_id("numbers", [], n): n for n in range(kill_graph.ROWS)}


def _number(body: Body) -> int:
    """The row a request belongs to: the second question of a row quotes the first."""
    found = re.search(r"What about (\d+)\?", body["messages"][-1]["content"])
    assert found is not None
    return int(found[1])


class CountingServer(FaultServer):
    """Counts the calls that arrived by the row they belong to."""

    def __init__(self) -> None:
        super().__init__(_PLAN, reply=lambda body: f"What about {_number(body)}? {reply_to(body)}")
        self._rows: dict[str, int] = {}

    def calls(self) -> Counter[int]:
        self._rows |= {key_of(body): _number(body) for body in self.bodies}
        counted: Counter[int] = Counter()
        for key, calls in self.asked.items():
            counted[self._rows[key]] += calls
        return counted


class Runs:
    """Runs of the graph, each in a process of its own that can be killed."""

    def __init__(self, server: asyncio.subprocess.Process, base_url: str) -> None:
        self._process = server
        self._base_url = base_url

    async def run(self, root: Path, *, kill_after: float | None = None) -> bool:
        """Run the graph in the workspace `root`; whether it ended by itself, and well."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{root} {self._base_url}\n".encode())
        pid = int(await self._word("started"))
        if kill_after is not None:
            await asyncio.sleep(kill_after)
            with suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        return await self._word("ended") == "0"

    async def _word(self, expected: str) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().split()
        assert line[0] == expected, line
        return line[1]


@pytest.fixture
async def server() -> AsyncIterator[CountingServer]:
    async with CountingServer() as running:
        yield running


@pytest.fixture
async def runs(server: CountingServer) -> AsyncIterator[Runs]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(_SCRIPT), "serve", stdin=pipe, stdout=pipe)
    yield Runs(process, server.base_url)
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def _shards(root: Path) -> dict[str, bytes]:
    """The bytes of every published shard, data and rejects."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("stages/[!.]*/*/*.parquet"))}


def _finished_rows(root: Path) -> set[int]:
    """The rows that the server need not be asked about again."""
    if list(root.glob("stages/ask-*/manifest.json")):
        return set(_NUMBERS.values())
    finished: set[int] = set()
    for path in root.glob("stages/.journals/*.sqlite"):
        with Journal(path) as journal:
            finished |= set(map(_NUMBERS.__getitem__, journal.keys()))
    return finished


def _batches(root: Path) -> set[str]:
    return set((root / "batches.txt").read_text().splitlines())


async def test_killed_at_twenty_instants_and_run_again_the_dataset_is_the_same(
    tmp_path: Path, server: CountingServer, runs: Runs
) -> None:
    assert await runs.run(tmp_path / "calm")
    started = time.monotonic()
    assert await runs.run(tmp_path / "calm2")
    seconds = time.monotonic() - started
    expected = _shards(tmp_path / "calm")
    assert len(expected) == 8
    assert pl.read_parquet(tmp_path / "calm/stages/ask-*/rejects/*.parquet")["reason"].unique().sort().to_list() == [
        "cut_at_length",
        "unlucky",
    ]

    chance = random.Random(0)
    stages_seen: Counter[int] = Counter()
    for n in range(KILLS):
        root = tmp_path / f"killed{n}"
        await runs.run(root, kill_after=(n + chance.random()) / KILLS * seconds)
        finished, before = _finished_rows(root), server.calls()
        stages_seen[len(list(root.glob("stages/[!.]*")))] += 1
        assert await runs.run(root)
        repeated = set(server.calls() - before) & finished
        assert repeated == set(), f"kill {n}"
        assert _shards(root) == expected, f"kill {n}"
        assert _batches(root) == _batches(tmp_path / "calm"), f"kill {n}"
        assert list(root.glob("stages/.journals/*")) == []
    assert len(stages_seen) >= 3, "the kills should meet the graph at several stages"


async def _process(root: Path, server: CountingServer) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(_SCRIPT), "run", str(root), server.base_url, stdout=asyncio.subprocess.PIPE
    )


async def test_two_runs_at_once_both_end_well_and_ask_for_every_row_once(
    tmp_path: Path, server: CountingServer
) -> None:
    server.plan = Plan(latency_s=0.01)
    both = [await _process(tmp_path, server) for _ in range(2)]
    said = {(await process.communicate())[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    assert server.calls() == dict.fromkeys(set(_NUMBERS.values()) - {13}, 2)
    (total,) = tmp_path.glob("stages/total-*")
    assert load_output(total) is not None


async def test_when_one_of_two_is_killed_the_other_finishes_its_work(tmp_path: Path, server: CountingServer) -> None:
    server.plan = Plan(latency_s=3600)
    first = await _process(tmp_path, server)
    async with asyncio.timeout(60):
        while not server.asked:
            await asyncio.sleep(0.01)
        second = await _process(tmp_path, server)
        while "waiting for process" not in (tmp_path / "events.jsonl").read_text():
            await asyncio.sleep(0.01)
    server.plan = Plan()
    first.kill()
    await second.communicate()
    assert second.returncode == 0
    alone = await _process(tmp_path / "alone", server)
    await alone.communicate()
    assert _shards(tmp_path) == _shards(tmp_path / "alone")
