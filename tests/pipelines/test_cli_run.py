"""`pipeline run` in real processes: exit codes, signals, kills. Prefect has its own tests; here it is `--direct`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tiny_cli import dataset_bytes, pipeline, start

from headwater.core.store import Workspace
from headwater.tests.waiting import wait_until

ROWS = 60
SLOW = ("--set", "square.wait_s=0.05", "--set", "square.concurrency=2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"flow: tiny\ncount: {{rows: {ROWS}}}\n")
    return path


def test_a_run_ends_with_a_summary_and_a_second_one_reuses_everything(workspace: Workspace, recipe: Path) -> None:
    first = pipeline(workspace.root, "run", "-c", str(recipe), "--direct")
    second = pipeline(workspace.root, "run", "-c", str(recipe), "--direct")

    assert (first.returncode, second.returncode) == (0, 0)
    assert "made all 3" in first.stdout
    assert "30 rows" in first.stdout
    assert "keep: 30 of 60 (odd 30)" in first.stdout
    assert "reused all 3 stages" in second.stdout
    assert "square: started." in first.stderr
    assert "square: 60 rows in" in first.stderr
    assert "started" not in second.stderr
    for line in ("dataset", "card", "report"):
        path = next(Path(text.split()[1]) for text in first.stdout.splitlines() if text.split()[0] == line)
        assert path.exists()


def test_a_failed_stage_is_exit_code_1_and_one_paragraph(workspace: Workspace, recipe: Path) -> None:
    ended = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", "--set", "square.fail_at=7")

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "Error: The number 7 has no square here. Unset square.fail_at."
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_the_traceback_of_an_unexpected_error_goes_to_the_run_folder(workspace: Workspace, recipe: Path) -> None:
    ended = pipeline(workspace.root, "run", "-c", str(recipe), "--direct", "--set", "square.crash_at=7")
    (path,) = workspace.runs.glob("*/*/traceback.txt")

    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "ZeroDivisionError: nobody expected this" in ended.stderr.splitlines()[-1]
    assert str(path) in ended.stderr
    assert "ZeroDivisionError" in path.read_text()


def test_ctrl_c_stops_after_what_is_in_flight_and_the_next_run_goes_on(
    workspace: Workspace, recipe: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    arguments = ("run", "-c", str(recipe), "--direct", "--set", f"square.log={log}")
    child = start(workspace.root, *arguments, *SLOW)
    wait_for_rows(log, 6)

    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    kept = len(log.read_text().split())
    status = pipeline(workspace.root, "status")
    resumed = pipeline(workspace.root, *arguments)

    assert child.returncode == 130
    assert "finishing what is in flight" in errors
    assert errors.splitlines()[-1].startswith("Error: Stopped as you asked; everything finished is kept.")
    assert 6 <= kept < ROWS
    assert "stopped, 1 of 3 stages finished" in status.stdout
    assert f"{kept} of {ROWS} rows kept" in status.stdout
    assert resumed.returncode == 0
    assert f"{kept:,} rows were already in the journal" in resumed.stderr, "each processed row was journalled"
    assert sorted(map(int, log.read_text().split())) == list(range(ROWS)), "no row was done twice, none was lost"


def test_a_second_signal_stops_at_once(workspace: Workspace, recipe: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = start(
        workspace.root, "run", "-c", str(recipe), "--direct", "--set", "square.wait_s=300",
        "--set", f"square.log={log}", "--set", "square.concurrency=60",
    )  # fmt: skip
    wait_until(Path(f"{log}.started").exists)
    time.sleep(0.2)

    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert child.poll() is None, "the first one waits for what is in flight"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)  # without the second one it would wait for half a minute

    assert child.returncode == 130
    assert "stopped" in pipeline(workspace.root, "status").stdout.splitlines()[0]


def test_a_killed_run_is_recognised_and_the_next_one_ends_in_the_same_bytes(
    workspace: Workspace, recipe: Path, tmp_path: Path
) -> None:
    log, other = tmp_path / "log", Workspace(tmp_path / "other")
    arguments = ("run", "-c", str(recipe), "--direct", "--set", f"square.log={log}")
    child = start(workspace.root, *arguments, "--set", "square.wait_s=1")  # far from its end while it is looked at
    wait_for_rows(log, 6)
    running = pipeline(workspace.root, "status").stdout

    child.kill()
    child.communicate(timeout=30)
    killed = pipeline(workspace.root, "status").stdout
    again = pipeline(workspace.root, *arguments)
    untouched = pipeline(other.root, "run", "-c", str(recipe), "--direct")

    assert "running, 1 of 3 stages finished" in running
    assert "rows/s" in running
    assert "killed, 1 of 3 stages finished" in killed
    assert "Run the pipeline again" in killed
    assert (again.returncode, untouched.returncode) == (0, 0)
    assert dataset_bytes(workspace.root) == dataset_bytes(other.root)


def test_two_runs_at_once_share_the_work(workspace: Workspace, recipe: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ("run", "-c", str(recipe), "--direct", "--set", f"square.log={log}", *SLOW)
    children = [start(workspace.root, *arguments) for _ in range(2)]
    outputs = [child.communicate(timeout=60) for child in children]

    assert [child.returncode for child in children] == [0, 0], outputs
    assert sorted(map(int, log.read_text().split())) == list(range(ROWS)), "each row was done by one of them"


def test_a_reader_that_goes_away_is_no_error(workspace: Workspace, recipe: Path) -> None:
    pipeline(workspace.root, "run", "-c", str(recipe), "--direct")
    child = start(workspace.root, "rows", "--json", "-n", "30", "--stage", "square")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    child.wait()

    assert "Traceback" not in errors
    assert "Error" not in errors


def test_a_workspace_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "file").write_text("")
    beneath = tmp_path / "file" / "workspace"

    ended = pipeline(beneath, "run", "-c", str(recipe), "--direct", home=tmp_path)

    assert ended.returncode == 2
    assert ended.stderr == (
        f"Error: The workspace {beneath} can't be written: Not a directory. "
        "Mend that, or give another folder with --workspace.\n"
    )


def wait_for_rows(log: Path, rows: int) -> None:
    wait_until(lambda: log.exists() and len(log.read_text().split()) >= rows)
