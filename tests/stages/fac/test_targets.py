"""Which features are aimed at, and which else a row may be kept for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.errors import PermanentError
from headwater.core.store import StageOutput
from headwater.stages.fac.select import Select, SelectConfig
from headwater.stages.fac.targets import Targets, TargetsConfig

FEATURES = {2: ["a"], 4: ["b"], 6: ["c"], 8: ["d"]}
FIRES: dict[str, dict[int, float]] = {
    "r1": {2: 5.0, 4: 5.0},
    "r2": {2: 5.0, 4: 5.0},
    "r3": {2: 5.0},
    "r4": {6: 5.0, 8: 0.5},
}
"""Feature 4 fires on rows that 2 fires on too; 6 on a row of its own; 8 nowhere above δ = 1."""


def _chosen(output: StageOutput) -> dict[int, bool]:
    return dict(output.read().select("feature", "chosen").iter_rows())


def _inputs(tables: Any, **facts: Any) -> dict[str, StageOutput]:
    missing = tables.missing(FEATURES, **facts)
    return {"missing": missing, "facts": missing, "anchor_features": tables.features("anchor", FIRES)}


def test_features_are_chosen_to_cover_different_rows(run: Callable[..., StageOutput], tables: Any) -> None:
    """By support, 2 and 4 would win; but 4 adds no row to what 2 covers."""
    output = run(Targets(TargetsConfig(limit=2)), _inputs(tables))
    assert _chosen(output) == {2: True, 4: False, 6: True, 8: False}
    assert output.metrics == {"targets": 4, "chosen": 2}


def test_what_the_seed_never_fires_comes_first_and_what_it_fires_too_rarely_fills_up(
    run: Callable[..., StageOutput], tables: Any
) -> None:
    inputs = _inputs(tables, in_seed=[2, 6])
    assert _chosen(run(Targets(TargetsConfig(limit=1)), inputs)) == {2: False, 4: True, 6: False, 8: False}
    assert _chosen(run(Targets(TargetsConfig(limit=3)), inputs)) == {2: True, 4: True, 6: False, 8: True}


def test_with_room_for_all_every_feature_is_aimed_at(run: Callable[..., StageOutput], tables: Any) -> None:
    assert all(_chosen(run(Targets(TargetsConfig(limit=9)), _inputs(tables))).values())


def test_features_that_are_not_missing_are_no_targets(run: Callable[..., StageOutput], tables: Any) -> None:
    inputs = _inputs(tables, f2="present", f4="random")
    assert set(_chosen(run(Targets(TargetsConfig()), inputs))) == {6, 8}


def test_with_nothing_left_the_run_ends_unless_that_is_accepted(run: Callable[..., StageOutput], tables: Any) -> None:
    inputs = _inputs(tables)
    with pytest.raises(PermanentError, match=r"no random features to write for.*allow_empty"):
        run(Targets(TargetsConfig(random_features=True)), inputs)
    assert run(Targets(TargetsConfig(random_features=True, allow_empty=True)), inputs).rows == 0


def test_the_control_aims_at_the_random_features_alone(run: Callable[..., StageOutput], tables: Any) -> None:
    inputs = _inputs(tables, f2="present", f4="random")
    assert _chosen(run(Targets(TargetsConfig(random_features=True)), inputs)) == {4: True}


def test_the_forecast_counts_every_feature_that_a_row_may_be_kept_for() -> None:
    """Rows are kept, and replies asked for, not only for those that prompts are written for."""
    assert Targets(TargetsConfig(limit=2)).forecast({"missing": 50}).rows == 50
    assert Select(SelectConfig(per_feature=1)).forecast({"targets": 50, "texts.1": 30, "texts.2": 30}).rows == 50
