"""What the seed fires of the missing features, what the new rows add, and what the seed never fires: by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.store import StageOutput
from headwater.stages.emit.dataset import DATASET_SCHEMA
from headwater.stages.fac.coverage import CoverageConfig, CoverageStage

ANCHOR: dict[str, dict[int, float]] = {f"a{n}": {1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0, 5: 5.0} for n in range(10)}
ANCHOR["a0"] = {**ANCHOR["a0"], 6: 1.0}
SEED: dict[str, dict[int, float]] = {"s0": {1: 5.0, 5: 5.0}, **{f"s{n}": {3: 0.5, 5: 5.0} for n in range(1, 10)}}
"""Of ten rows each, the seed fires 1 in one row, 2 and 4 in none, 3 only below δ = 1, and 5 as often as the anchor."""
MADE: dict[str, dict[int, float]] = {"n0": {2: 5.0, 3: 0.5, 5: 5.0}, "n1": {3: 5.0}, "unused": {1: 9.0, 4: 9.0}}
"""The last row was made and not kept for the dataset."""
RATE = {"test": "rate", "alpha": 0.05, "control_false_discoveries": False, "min_support": 2, "width": 8}


def _measured(
    run: Callable[..., StageOutput], tables: Any, *, test: str, kept: dict[int, list[str]] | None = None
) -> StageOutput:
    """With δ = 1; `missing` is what `test` finds, unless a judge `kept` less of it."""
    found = {"rate": {1: ["a"], 2: ["a"], 3: ["a"], 4: ["a"]}, "set_difference": {2: ["a"], 3: ["a"], 4: ["a"]}}[test]
    facts = tables.missing(found, facts=RATE | {"test": test})
    rows = [dict.fromkeys(DATASET_SCHEMA.names) | {"id": f"row-{name}", "source": name} for name in ("n0", "n1")]
    inputs = {
        "facts": facts,
        "missing": tables.missing(kept, facts=RATE | {"test": test}) if kept else facts,
        "targets": tables.targets(found, {1, 2} & found.keys()),
        "space": tables.space(8),
        "anchor_features": tables.features("anchor", ANCHOR),
        "seed_features": tables.features("seed", SEED),
        "dataset": tables.make("dataset", DATASET_SCHEMA, rows),
        "features.1": tables.features("1", MADE),
    }
    return run(CoverageStage(CoverageConfig(sweep=(0.0, 0.9))), inputs)


def test_what_the_seed_fires_of_the_missing_features_stands_before_what_the_rows_add(
    run: Callable[..., StageOutput], tables: Any
) -> None:
    metrics = _measured(run, tables, test="rate").metrics
    assert metrics["missing"] == 4
    assert metrics["missing_before"] == pytest.approx(1 / 4), "feature 1, in one row of ten"
    assert metrics["missing_covered"] == pytest.approx(2 / 4), "features 2 and 3, without the row that was not kept"
    assert metrics["missing_after"] == pytest.approx(3 / 4)
    assert (metrics["chosen"], metrics["chosen_before"], metrics["chosen_after"]) == (2, 0.5, 1.0)


def test_missing_features_that_the_seed_never_fires_above_delta_are_counted_apart(
    run: Callable[..., StageOutput], tables: Any
) -> None:
    metrics = _measured(run, tables, test="rate").metrics
    assert metrics["missing_never"] == 3, "2, 4, and 3, which it fires below δ alone"
    assert metrics["missing_never_covered"] == pytest.approx(2 / 3), "of these the rows fire 2 and 3"
    assert (metrics["chosen_never"], metrics["chosen_never_covered"]) == (1, 1.0)


def test_by_set_difference_the_seed_fires_nothing_that_is_missing(run: Callable[..., StageOutput], tables: Any) -> None:
    metrics = _measured(run, tables, test="set_difference").metrics
    assert metrics["missing"] == metrics["missing_never"] == 3
    assert metrics["missing_before"] == 0.0
    assert metrics["missing_after"] == metrics["missing_covered"] == metrics["missing_never_covered"]


def test_the_sweep_tells_the_same_at_every_delta(run: Callable[..., StageOutput], tables: Any) -> None:
    """The anchor's values are one 1 and fifty times 5: δ is 1 at the bottom, and 5 above, which nothing exceeds."""
    output = _measured(run, tables, test="rate")
    low, high = output.read().sort("quantile").to_dicts()
    assert (low["delta"], low["n_missing"], low["n_missing_never"]) == (1.0, 4, 3)
    for share in ("missing_before", "missing_covered", "missing_after", "missing_never_covered"):
        assert low[share] == output.metrics[share]
        assert high[share] is None, "no share of nothing"


def test_what_a_judge_turned_down_counts_neither_before_nor_after(run: Callable[..., StageOutput], tables: Any) -> None:
    metrics = _measured(run, tables, test="rate", kept={1: ["a"], 4: ["a"]}).metrics
    assert (metrics["missing"], metrics["missing_before"], metrics["missing_after"]) == (2, 0.5, 0.5)
    assert (metrics["missing_never"], metrics["missing_never_covered"]) == (1, 0.0)
