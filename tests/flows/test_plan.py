from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_flow import CountConfig, Square, SquareConfig, Tiny

from headwater.core.errors import ConfigError
from headwater.core.meter import Price
from headwater.core.store import Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.plan import make_plan
from headwater.flows.rates import Rate, Rates, rough_seconds
from headwater.flows.runs import create_run
from headwater.llm.registry import EngineConfig
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


def _asking(engine: EngineConfig, **settings: Any) -> Tiny:
    return Tiny(pipeline="tiny", square=SquareConfig(engine=engine, concurrency=4), **settings)


SERVER = EngineConfig(engine="openai", base_url="http://127.0.0.1:1/v1", model="/srv/big", max_concurrency=3)


@pytest.mark.parametrize("name", ["/srv/big", "big"])
def test_dollars_are_forecast_from_a_price_under_either_name(workspace: Workspace, name: str) -> None:
    plan = make_plan(_asking(SERVER, prices={name: Price(input=1e6, output=1e6)}), workspace)

    assert {planned.node.name: planned.dollars for planned in plan.nodes}["square"] == 6 * (10 + 20)


def test_a_price_that_no_engine_goes_by_is_refused_with_the_names_that_do(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match="'bgi', which no engine") as caught:
        make_plan(_asking(SERVER, prices={"bgi": Price()}), workspace)
    assert caught.value.todo == "Did you mean 'big'? Names of this recipe's engines: /srv/big, big."
    with pytest.raises(ConfigError) as caught:
        make_plan(Tiny(pipeline="tiny", prices={"m": Price()}), workspace)
    assert caught.value.todo == "This recipe asks no engine."


def test_seconds_are_guessed_where_nothing_was_measured_and_marked(workspace: Workspace) -> None:
    nodes = {planned.node.name: planned for planned in make_plan(_asking(SERVER), workspace).nodes}
    assert nodes["square"].seconds == 4.0, "6 calls, 3 at once, 2 s each"
    assert nodes["keep"].seconds is not None and nodes["keep"].seconds < 0.1
    assert nodes["square"].rough and nodes["keep"].rough

    Rates(workspace).record("square", "/srv/big", Rate(rows=6, tokens_out=12, seconds=6.0))
    nodes = {planned.node.name: planned for planned in make_plan(_asking(SERVER), workspace).nodes}
    assert nodes["square"].seconds == pytest.approx(60.0), "120 tokens at the 2 tokens/s that were measured"
    assert not nodes["square"].rough and nodes["keep"].rough


def test_the_embedded_model_is_guessed_by_cores_and_another_local_one_is_not() -> None:
    forecast = Forecast(rows=10, calls=10, tokens_out=8_000)
    one, half = (
        rough_seconds(Square(SquareConfig(engine=EngineConfig(threads=1))), replace(forecast, tokens_out=tokens), 10)
        for tokens in (8_000, 4_000)
    )
    mine = EngineConfig(engine="transformers", model="/srv/mine")

    assert one is not None and half is not None
    assert 10 < one < 1_000 and one == pytest.approx(2 * half)
    assert rough_seconds(Square(SquareConfig(engine=mine)), forecast, 10) is None
