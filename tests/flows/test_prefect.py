"""The flow against real Prefect APIs: our own child server, and one that stands for the user's."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tiny_cli import dataset_bytes, pipeline, start

from headwater.flows.prefect_server import LocalApi, local_api
from headwater.tests.waiting import wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One workspace for all tests: creating Prefect's database takes longest."""
    return tmp_path_factory.mktemp("prefect") / "workspace"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text("flow: tiny\ncount: {rows: 12}\n")
    return path


@pytest.fixture(scope="module")
def first_run(root: Path, recipe: Path) -> subprocess.CompletedProcess[str]:
    return pipeline(root, "run", "-c", str(recipe))


def test_a_flow_gives_the_bytes_of_a_direct_run(
    first_run: subprocess.CompletedProcess[str], root: Path, recipe: Path, tmp_path: Path
) -> None:
    direct = pipeline(tmp_path / "direct", "run", "-c", str(recipe), "--direct")

    assert (first_run.returncode, direct.returncode) == (0, 0), first_run.stderr
    assert dataset_bytes(root) == dataset_bytes(tmp_path / "direct")


def test_prefect_knows_every_stage_and_how_it_ended(first_run: subprocess.CompletedProcess[str], root: Path) -> None:
    assert first_run.returncode == 0
    assert states(root) == [("count", "COMPLETED"), ("square", "COMPLETED"), ("keep", "COMPLETED")]
    assert query(root, "select f.name, r.state_type from flow_run r join flow f on f.id = r.flow_id") == [
        ("tiny", "COMPLETED")
    ]


def test_prefect_says_nothing_and_keeps_its_things_in_the_workspace(
    first_run: subprocess.CompletedProcess[str], root: Path
) -> None:
    home = root.parent / "home"

    assert "Traceback" not in first_run.stderr
    assert all(line[2] == ":" for line in first_run.stderr.splitlines()), (
        "only lines of our own, which begin with a time"
    )
    assert not (home / ".prefect").exists()
    assert not list(root.rglob(".sdk_telemetry"))


def test_a_run_that_reuses_everything_starts_no_server(
    first_run: subprocess.CompletedProcess[str], root: Path, recipe: Path
) -> None:
    before = (root / "prefect" / "server.log").stat().st_mtime_ns

    again = pipeline(root, "run", "-c", str(recipe))

    assert "reused all 3 stages" in again.stdout
    assert "prefect" not in again.stderr
    assert (root / "prefect" / "server.log").stat().st_mtime_ns == before


def test_a_server_still_starting_dies_with_a_killed_run(
    first_run: subprocess.CompletedProcess[str], root: Path, recipe: Path
) -> None:
    child = start(root, "run", "-c", str(recipe), "--set", "count.rows=14")
    wait_until(lambda: children_of(child.pid))
    (server,) = children_of(child.pid)

    child.kill()
    child.communicate()

    wait_until(lambda: not is_running(server), seconds=10)


def test_two_servers_that_create_one_database_at_once_both_serve(tmp_path: Path) -> None:
    with local_api(tmp_path) as first, local_api(tmp_path) as second:
        first.wait_ready()
        second.wait_ready()


@pytest.fixture(scope="module")
def their_server(root: Path, first_run: subprocess.CompletedProcess[str]) -> Iterator[LocalApi]:
    with local_api(root / "prefect") as api:
        api.wait_ready()
        yield api


def test_with_the_users_api_url_the_flow_reports_there(their_server: LocalApi, recipe: Path, tmp_path: Path) -> None:
    ours = tmp_path / "workspace"

    ended = pipeline(ours, "run", "-c", str(recipe), PREFECT_API_URL=their_server.url)
    artifacts = {found["key"]: found for found in ask(their_server, "artifacts/filter")}
    counts = json.loads(artifacts["tiny-counts"]["data"])

    assert ended.returncode == 0, ended.stderr
    assert not (ours / "prefect" / "prefect.db").exists()
    assert [(row["stage"], row["attempted"], row["rejected"]) for row in counts] == [
        ("count", 12, 0),
        ("square", 12, 0),
        ("keep", 12, 6),
    ]
    assert "report.html" in artifacts["tiny-report"]["data"]
    assert (artifacts["tiny-square"]["type"], artifacts["tiny-square"]["data"]) == ("progress", 100.0)


def test_a_failed_stage_is_failed_in_prefect_and_our_own_error_here(
    their_server: LocalApi, root: Path, recipe: Path
) -> None:
    ended = pipeline(
        root, "run", "-c", str(recipe), "--set", "count.rows=13", "--set", "square.fail_at=12",
        PREFECT_API_URL=their_server.url,
    )  # fmt: skip

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "Error: The number 12 has no square here. Unset square.fail_at."
    assert "Traceback" not in ended.stderr
    assert states(root)[-2:] == [("count", "COMPLETED"), ("square", "FAILED")]


def test_sigterm_stops_a_flow_gracefully_and_prefect_calls_it_cancelled(
    their_server: LocalApi, root: Path, recipe: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    child = start(
        root, "run", "-c", str(recipe), "--set", "count.rows=200", "--set", "square.wait_s=0.05",
        "--set", f"square.log={log}", PREFECT_API_URL=their_server.url,
    )  # fmt: skip
    wait_until(log.exists)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=30)

    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("Error: Stopped as you asked; everything finished is kept.")
    assert states(root)[-1] == ("square", "CANCELLED")


def test_a_server_of_the_user_that_is_not_there_is_an_error_that_offers_the_direct_way(
    recipe: Path, tmp_path: Path
) -> None:
    ended = pipeline(tmp_path / "w", "run", "-c", str(recipe), PREFECT_API_URL="http://127.0.0.1:9/api")

    assert ended.returncode == 1
    complaint = ended.stderr.splitlines()[-1]
    assert "Prefect could not run the flow against the server at http://127.0.0.1:9/api" in complaint
    assert "`--direct`" in complaint
    assert "Traceback" not in ended.stderr


def query(root: Path, sql: str) -> list[tuple[str, ...]]:
    with sqlite3.connect(root / "prefect" / "prefect.db") as database:
        return database.execute(sql).fetchall()


def states(root: Path) -> list[tuple[str, ...]]:
    return query(root, "select name, state_type from task_run order by expected_start_time")


def ask(server: LocalApi, path: str) -> list[dict[str, Any]]:
    request = Request(f"{server.url}/{path}", b'{"sort": "CREATED_DESC"}', {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as reply:
        found: list[dict[str, Any]] = json.load(reply)
    found.reverse()
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
