"""Commands that look: `list`, `show`, `status`, `rows`, `report`, `doctor`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.core.store import Workspace
from headwater.flows.runs import find_run
from headwater.pipelines import recipes
from headwater.pipelines.cli import main


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text("flow: tiny\ncount: {rows: 6}\n")
    return str(path)


def call(workspace: Workspace, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["--workspace", str(workspace.root), *arguments])
    return int(ended.value.code or 0)


def output(capsys: pytest.CaptureFixture[str], workspace: Workspace, *arguments: str) -> str:
    capsys.readouterr()
    assert call(workspace, *arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def ran(workspace: Workspace, tiny: str, capsys: pytest.CaptureFixture[str]) -> Workspace:
    assert call(workspace, "run", "-c", tiny, "--direct") == 0
    capsys.readouterr()
    return workspace


def test_list_names_every_shipped_recipe_on_a_line_of_its_own(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(capsys, workspace, "list").splitlines()

    assert [line.split()[0] for line in lines] == sorted(path.stem for path in recipes.SHIPPED.glob("*.yaml"))
    assert all(len(line.split()) > 3 for line in lines), "each has its title"


def test_show_prints_recipe_stages_reuse_and_forecast_and_leaves_nothing_behind(
    workspace: Workspace, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, workspace, "show", "-c", tiny)

    assert "flow: tiny" in text
    assert "rows: 6" in text
    assert "count (id, number)" in text, "what square reads of count"
    assert "0 of 3 stages would be reused; the first to be made is count." in text
    assert "Time: about 1 s (rough: nothing was measured here yet)." in text
    assert not workspace.root.exists()


def test_show_names_what_differs_from_the_output_that_is_there(
    ran: Workspace, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "All 3 stages are there" in output(capsys, ran, "show", "-c", tiny)
    changed = output(capsys, ran, "show", "-c", tiny, "--seed", "5", "--set", "count.rows=9")

    assert "config.rows: 6 → 9" in changed
    assert "seed: 0 → 5" in changed


def test_status_shows_every_stage_with_rows_and_rejects(ran: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, ran, "status", "tiny").splitlines()
    stages = {line.split()[0]: line.split()[1:4] for line in lines if line.split()[1:2] in (["done"], ["reused"])}

    assert "done, 3 of 3 stages finished, 3 rows in " in lines[0]
    assert stages == {"count": ["done", "6", "0"], "square": ["done", "6", "0"], "keep": ["done", "3", "3"]}


def test_status_of_a_run_whose_outputs_were_deleted_says_so(ran: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run = find_run(ran, "tiny")
    (ran.stages / run.lineage["square"]["output"] / "manifest.json").unlink()

    assert "output gone" in output(capsys, ran, "status")


def test_rows_prints_the_dataset_as_one_json_object_per_line(
    ran: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in output(capsys, ran, "rows", "tiny", "--json", "-n", "2").splitlines()]

    assert [row["square"] for row in rows] == [0, 4]


def test_rows_shows_any_stage_and_what_was_rejected_with_its_reason(
    ran: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    square = output(capsys, ran, "rows", "--stage", "square", "-n", "1")
    rejected = output(capsys, ran, "rows", "--rejects")
    none = output(capsys, ran, "rows", "--rejects", "--stage", "count")

    assert "row 1 of 6" in square
    assert rejected.count("odd") == 3
    assert "keep" in rejected
    assert "No rejected rows." in none


def test_rows_of_a_stage_that_is_not_there_is_an_error_with_a_guess(
    ran: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(ran, "rows", "--stage", "sqare") == 2
    assert "Did you mean 'square'? It has: count, square, keep." in capsys.readouterr().err


def test_report_prints_a_path_and_writes_a_missing_report_anew(
    ran: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(output(capsys, ran, "report").strip())
    before = path.read_text()
    path.unlink()

    assert Path(output(capsys, ran, "report", "tiny").strip()) == path
    assert path.read_text() == before


def test_a_run_that_failed_has_no_report_and_says_so(
    workspace: Workspace, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(workspace, "run", "-c", tiny, "--direct", "--set", "square.fail_at=2") == 1
    capsys.readouterr()

    assert call(workspace, "report") == 2
    assert "has no report: it is failed" in capsys.readouterr().err
    assert call(workspace, "rows") == 2
    assert "has no dataset yet (it is failed)" in capsys.readouterr().err


def test_doctor_names_engines_extras_and_the_workspace(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, workspace, "doctor")

    for what in (
        "python",
        "cores",
        "memory",
        "gpu",
        "prefect",
        "engine openai",
        "extra local",
        "workspace",
        "free disk",
    ):
        assert any(line[3:].startswith(what) for line in text.splitlines()), what
    assert not workspace.root.exists()


def test_the_workspace_may_be_named_after_the_command(ran: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--workspace", str(ran.root)])

    assert not ended.value.code
    assert "done, 3 of 3 stages finished" in capsys.readouterr().out
