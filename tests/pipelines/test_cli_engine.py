"""Runs against a real HTTP server: what they cost, what the budget does, and that a key shows up nowhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tiny_cli import pipeline

from headwater.core.store import Workspace

SERVER = Path(__file__).parent.parent / "llm" / "fault_server.py"
KEY = "sk-tiny-0123456789abcdef0123456789"
ROWS = 20


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    # Slow enough that even a fast machine measures a speed: what takes no time at all says nothing about it.
    command = [sys.executable, str(SERVER), "--port", "0", "--latency-ms", "60"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    yield line.split()[-1]
    server.kill()
    server.wait()
    server.stdout.close()


@pytest.fixture
def recipe(tmp_path: Path, base_url: str) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"flow: tiny\ncount: {{rows: {ROWS}}}\nsquare:\n  concurrency: 1\n"
        f"  engine: {{engine: openai, model: fake, base_url: {base_url}, api_key_env: TINY_KEY}}\n"
        "prices: {fake: {input: 1000, output: 2000}}\n"
    )
    return path


def test_a_key_in_the_environment_is_in_no_file_and_no_output(workspace: Workspace, recipe: Path) -> None:
    ran = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)
    shown = pipeline(workspace.root, "show", "-c", str(recipe), TINY_KEY=KEY)
    status = pipeline(workspace.root, "status", TINY_KEY=KEY)
    files = [path for path in workspace.root.rglob("*") if path.is_file()]

    assert (ran.returncode, shown.returncode, status.returncode) == (0, 0, 0), ran.stderr
    assert len(files) > 10
    assert [str(path) for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in "".join(output for ended in (ran, shown, status) for output in (ended.stdout, ended.stderr))


def test_a_server_that_echoes_the_refused_key_does_not_bring_it_into_the_error(
    workspace: Workspace, recipe: Path, base_url: str
) -> None:
    script = Request(base_url.removesuffix("/v1") + "/script", json.dumps(["unauthorized"]).encode())
    urlopen(script, timeout=10).close()

    ended = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)

    assert ended.returncode == 1
    assert "401" in ended.stderr
    assert KEY not in ended.stderr
    assert [
        str(path) for path in workspace.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ] == []


def test_a_key_that_is_not_set_is_named_before_anything_is_asked(workspace: Workspace, recipe: Path) -> None:
    ended = pipeline(workspace.root, "run", "-c", str(recipe), "--direct")

    assert ended.returncode == 2
    assert "The environment variable TINY_KEY (api_key_env) is not set." in ended.stderr


def test_the_summary_counts_tokens_and_dollars(workspace: Workspace, recipe: Path) -> None:
    ran = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)
    tokens_in, tokens_out, calls = (
        int(re.search(pattern, ran.stdout)[1])  # type: ignore[index]
        for pattern in (r"tokens +(\d+) in", r"(\d+) out", r"(\d+) calls")
    )

    assert calls == ROWS
    assert f"${(tokens_in * 1000 + tokens_out * 2000) / 1_000_000:.4f}" in ran.stdout


def test_a_model_without_a_price_is_named(workspace: Workspace, recipe: Path) -> None:
    ran = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", "--set", "prices=null", TINY_KEY=KEY)

    assert ran.returncode == 2, "null is no mapping of prices"
    recipe.write_text("".join(line for line in recipe.open() if not line.startswith("prices")))
    ran = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)
    assert "not counted: fake (no price in the recipe's `prices`)" in ran.stdout


def test_a_price_that_no_engine_goes_by_is_refused_before_anything_runs(workspace: Workspace, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("fake: {input", "another: {input"))
    ran = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)

    assert ran.returncode == 2
    assert "'another', which no engine of the recipe is called" in ran.stderr
    assert "Names of this recipe's engines: fake." in ran.stderr
    assert not list(workspace.root.rglob("events.jsonl"))


@pytest.mark.parametrize("name", ["/srv/models/fake", "fake"])
def test_a_budget_binds_whichever_name_of_the_model_has_the_price(
    workspace: Workspace, recipe: Path, name: str
) -> None:
    recipe.write_text(
        recipe.read_text().replace("model: fake", "model: /srv/models/fake").replace("{fake:", f"{{{name}:")
    )
    stopped = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", "--max-cost", "0.05", TINY_KEY=KEY)

    assert stopped.returncode == 130, stopped.stderr
    assert "spent of at most $0.0500" in stopped.stderr


def test_a_spent_budget_stops_with_everything_kept_and_a_higher_one_goes_on(workspace: Workspace, recipe: Path) -> None:
    stopped = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", "--max-tokens", "100", TINY_KEY=KEY)
    went_on = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)

    assert stopped.returncode == 130
    assert re.search(r"tokens used of at most 100, .*everything finished is kept\.", stopped.stderr), stopped.stderr
    assert went_on.returncode == 0
    assert "rows were already in the journal" in went_on.stderr
    assert "for all its rows since they were first made" in went_on.stdout


def test_show_forecasts_calls_tokens_and_dollars_and_after_a_run_seconds(workspace: Workspace, recipe: Path) -> None:
    before = pipeline(workspace.root, "show", "-c", str(recipe), TINY_KEY=KEY).stdout
    pipeline(workspace.root, "run", "-c", str(recipe), "--direct", TINY_KEY=KEY)
    after = pipeline(workspace.root, "show", "-c", str(recipe), "--set", "count.rows=40", TINY_KEY=KEY).stdout

    assert "In all: 20 calls, 200 tokens in, 400 tokens out." in before
    assert "Cost: $1.0000." in before, "200 × $1,000 + 400 × $2,000, per million"
    assert "Speed of fake: not measured here yet." in before
    assert "In all: 40 calls" in after
    assert "tokens/s, measured in earlier runs here." in after
