from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny_flow import CountConfig, SquareConfig, Tiny

from headwater.core.errors import ConfigError, PermanentError, Stopped
from headwater.core.events import read_events
from headwater.core.meter import Price
from headwater.core.store import Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.runs import create_run
from headwater.llm.registry import EngineConfig


def prepared(recipe: Tiny, workspace: Workspace) -> Execution:
    return Execution(recipe, create_run(workspace, recipe.pipeline, recipe.resolved()), workspace)


def test_a_run_leaves_a_dataset_that_the_datasets_library_loads(workspace: Workspace, tmp_path: Path) -> None:
    execution = prepared(Tiny(pipeline="tiny", count=CountConfig(rows=6)), workspace)

    state = execute(execution)
    loaded = datasets.load_dataset(str(execution.run.path), cache_dir=str(tmp_path / "hf"), split="train")

    assert loaded["square"] == [0, 4, 16]
    assert state["rows"] == 3
    assert execution.run.status == "done"
    assert "<!doctype html>" in (execution.run.path / "report.html").read_text()


def test_the_lineage_names_every_output_with_its_parents(workspace: Workspace) -> None:
    execution = prepared(Tiny(pipeline="tiny"), workspace)

    execute(execution)
    lineage = execution.run.lineage

    assert list(lineage) == ["count", "square", "keep"]
    assert lineage["keep"]["parents"] == {"rows": "square"}
    assert all((workspace.stages / entry["output"]).is_dir() for entry in lineage.values())


def test_a_second_run_reuses_every_stage_and_orchestrates_nothing(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny")
    execute(prepared(recipe, workspace))

    def orchestrate(_: Execution) -> None:
        raise AssertionError("nothing is left to do")

    again = prepared(recipe, workspace)
    state = execute(again, orchestrate)

    assert (state["reused"], state["stages"]) == (3, 3)
    assert (again.run.path / "dataset").is_dir()


def test_a_changed_config_remakes_only_the_stage_and_what_follows(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny", count=CountConfig(rows=6))
    execute(prepared(recipe, workspace))

    same = execute(prepared(recipe.model_copy(update={"square": SquareConfig(concurrency=5)}), workspace))
    more = prepared(recipe.model_copy(update={"count": CountConfig(rows=8)}), workspace)
    execute(more)
    notes = [event["text"] for event in read_events(more.run.events_path) if event["kind"] == "note"]

    assert same["reused"] == 3, "a knob changes no row"
    assert not any(result.reused for result in more.results.values())
    assert any("config.rows: 6 → 8" in note for note in notes)


def test_a_failing_stage_keeps_what_was_finished_and_the_run_says_why(workspace: Workspace, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recipe = Tiny(pipeline="tiny", square=SquareConfig(fail_at=4, concurrency=1, log=str(log)))
    execution = prepared(recipe, workspace)

    with pytest.raises(PermanentError, match="The number 4 has no square here"):
        execute(execution)
    assert execution.run.status == "failed"
    assert execution.run.state["error"] == "The number 4 has no square here."

    mended = recipe.model_copy(update={"square": SquareConfig(log=str(log))})
    assert execute(prepared(mended, workspace))["rows"] == 3
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4", "5"], "no row was done twice"


def test_an_error_nobody_expected_marks_the_run_as_failed(workspace: Workspace) -> None:
    execution = prepared(Tiny(pipeline="tiny", square=SquareConfig(crash_at=2)), workspace)

    with pytest.raises(ZeroDivisionError):
        execute(execution)

    assert execution.run.state["error"] == "ZeroDivisionError: nobody expected this"


def test_a_stop_before_the_first_stage_runs_nothing(workspace: Workspace) -> None:
    execution = prepared(Tiny(pipeline="tiny"), workspace)
    execution.stop.set()

    with pytest.raises(Stopped):
        execute(execution)

    assert execution.run.status == "stopped"
    assert execution.run.lineage == {}


SERVER = EngineConfig(engine="openai", base_url="http://127.0.0.1:1/v1", model="big")


def test_a_budget_that_nothing_would_be_charged_to_is_refused_before_anything_is_asked(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny", square=SquareConfig(engine=SERVER))
    run = create_run(workspace, recipe.pipeline, recipe.resolved())

    with pytest.raises(ConfigError, match=r"budget of \$1 .*'prices' has no price for 'big'"):
        Execution(recipe, run, workspace, max_cost=1.0)

    assert run.status == "failed" and "no price for 'big'" in run.state["error"]
    assert not workspace.stages.exists()


def test_a_price_that_no_engine_goes_by_is_refused_without_the_command_too(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny", square=SquareConfig(engine=SERVER), prices={"bgi": Price()})
    with pytest.raises(ConfigError, match="'bgi', which no engine"):
        prepared(recipe, workspace)


@pytest.mark.parametrize("square", [SquareConfig(engine=SERVER), SquareConfig(engine=EngineConfig()), SquareConfig()])
def test_a_budget_is_kept_with_a_price_or_where_nothing_costs(workspace: Workspace, square: SquareConfig) -> None:
    prices = {"big": Price()} if square.engine == SERVER else {}
    recipe = Tiny(pipeline="tiny", square=square, prices=prices)
    run = create_run(workspace, recipe.pipeline, recipe.resolved())

    Execution(recipe, run, workspace, max_cost=1.0).close()

    assert run.status == "running"


def test_listeners_hear_the_run_from_beginning_to_end(workspace: Workspace) -> None:
    heard: list[Mapping[str, Any]] = []
    recipe = Tiny(pipeline="tiny")
    run = create_run(workspace, "tiny", recipe.resolved())

    execute(Execution(recipe, run, workspace, (heard.append,)))
    kinds = [event["kind"] for event in heard]

    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_finished"
    assert [e["stage"] for e in heard if e["kind"] == "stage_finished"] == ["count", "square", "keep"]
    assert len(heard) == len(list(read_events(run.events_path)))


def test_a_full_disk_is_an_error_that_says_so_and_more_room_lets_the_run_go_on(
    small_disk: Callable[[int], Path],
) -> None:
    workspace = Workspace(small_disk(400) / "workspace")
    recipe = Tiny(pipeline="tiny", count=CountConfig(rows=20_000))

    with pytest.raises(PermanentError, match="The disk is full"):
        execute(prepared(recipe, workspace))
    small_disk(20_000)

    assert execute(prepared(recipe, workspace))["rows"] == 10_000
