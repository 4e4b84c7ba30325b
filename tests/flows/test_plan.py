from __future__ import annotations

import pytest
from tiny_flow import CountConfig, SquareConfig, Tiny

from headwater.core.store import Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.plan import make_plan
from headwater.flows.rates import Rate, Rates
from headwater.flows.runs import create_run
from headwater.stages.base import Forecast


def run(recipe: Tiny, workspace: Workspace) -> None:
    execute(Execution(recipe, create_run(workspace, recipe.pipeline, recipe.resolved()), workspace))


def test_a_plan_in_an_empty_workspace_makes_everything_and_writes_nothing(workspace: Workspace) -> None:
    plan = make_plan(Tiny(pipeline="tiny"), workspace)

    assert [planned.node.name for planned in plan.to_make] == ["count", "square", "keep"]
    assert plan.why == ()
    assert not workspace.root.exists()


def test_a_plan_tells_what_differs_in_the_first_stage_to_be_made(workspace: Workspace) -> None:
    run(Tiny(pipeline="tiny", count=CountConfig(rows=6)), workspace)

    plan = make_plan(Tiny(pipeline="tiny", count=CountConfig(rows=7)), workspace)

    assert [planned.node.name for planned in plan.to_make] == ["count", "square", "keep"]
    assert "config.rows: 6 → 7" in plan.why


def test_a_plan_after_a_run_reuses_everything(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny")
    run(recipe, workspace)

    assert make_plan(recipe, workspace).to_make == ()


def test_seconds_are_forecast_from_what_a_stage_took_here_before(workspace: Workspace) -> None:
    run(Tiny(pipeline="tiny", count=CountConfig(rows=10), square=SquareConfig(wait_s=0.02, concurrency=1)), workspace)

    plan = make_plan(Tiny(pipeline="tiny", count=CountConfig(rows=100)), workspace)
    seconds = {planned.node.name: planned.seconds for planned in plan.nodes}

    assert seconds["square"] is not None
    assert 2.0 <= seconds["square"] < 20.0, "ten times the rows of a stage that took 0.2 s or more"


def test_tokens_over_the_measured_rate_give_seconds(workspace: Workspace) -> None:
    rates = Rates(workspace)
    rates.record("generate", "m", Rate(rows=10, tokens_out=500, seconds=5.0))
    rates.record("judge", "m", Rate(rows=10, tokens_out=100, seconds=10.0))
    fresh = Rates(workspace)

    own = fresh.seconds("generate", Forecast(rows=1, calls=1, tokens_out=2_000, model="m"), rows=1)
    other = fresh.seconds("rewrite", Forecast(rows=1, calls=1, tokens_out=2_000, model="m"), rows=1)
    unknown = fresh.seconds("generate", Forecast(rows=1, calls=1, tokens_out=2_000, model="n"), rows=1)

    assert own == pytest.approx(20.0), "2,000 tokens at the stage's own 100 tokens/s"
    assert other == pytest.approx(50.0), "2,000 tokens at the model's 600 tokens in 15 s"
    assert unknown is None


def test_what_a_stage_knows_better_comes_first(workspace: Workspace) -> None:
    Rates(workspace).record("train", "", Rate(rows=10, tokens_out=0, seconds=5.0))

    assert Rates(workspace).seconds("train", Forecast(rows=10, seconds=3.0), rows=10) == 3.0
    assert Rates(workspace).seconds("train", Forecast(rows=20), rows=20) == pytest.approx(10.0)


def test_a_damaged_file_of_rates_counts_as_none(workspace: Workspace) -> None:
    workspace.cache.mkdir(parents=True)
    (workspace.cache / "rates.json").write_text('{"a|b": [1]}')

    assert Rates(workspace).tokens_per_second("b") is None
