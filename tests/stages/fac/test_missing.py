"""Why nothing is missing: because the seed has it all, or because the anchor fires nothing that could be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headwater.core.errors import ConfigError
from headwater.core.fingerprint import Fingerprint
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.registry import EngineConfig
from headwater.stages.base import StageContext
from headwater.stages.fac.missing import Missing, MissingConfig

Rows = Mapping[str, Mapping[int, float]]
Complain = Callable[..., str]


@pytest.fixture
def complaint(tables: Any, context: StageContext) -> Complain:
    """What the stage says when it finds nothing. It stops before any model is read, so none is opened."""

    def find(anchor: Rows, seed: Rows, **config: Any) -> str:
        stage = Missing(MissingConfig(model=EngineConfig(), **config))
        inputs: dict[str, StageOutput] = {
            "anchor": tables.loaded("anchor", list(anchor)),
            "anchor_features": tables.features("anchor", anchor),
            "seed_features": tables.features("seed", seed),
            "space": tables.space(8),
        }
        out = OutputWriter(context.workspace.output_path("missing", Fingerprint({})), stage.output, "Stage missing")
        with pytest.raises(ConfigError) as caught:
            stage.run(inputs, out, context)
        out.abandon()
        return str(caught.value)

    return find


FOUR: Rows = {f"a{n}": {1: 5.0, 2: 3.0 + n} for n in range(4)}
BARE: Rows = {"s0": {1: 5.0}}


def test_an_anchor_of_one_row_is_not_a_seed_that_has_it_all(complaint: Complain) -> None:
    said = complaint({"a0": {1: 5.0, 2: 4.0, 3: 1.0}}, BARE, delta=2.0)
    assert "Nothing is missing" not in said
    assert "in its 1 row 2 features fire above δ = 2 (`missing.delta`)" in said
    assert "none of them in `missing.min_support` = 2 rows" in said


@pytest.mark.parametrize("test", ["rate", "set_difference"])
def test_a_delta_that_nothing_reaches_is_named(complaint: Complain, test: str) -> None:
    said = complaint(FOUR, BARE, delta=1e9, test=test)
    assert "Nothing is missing" not in said
    assert "no feature fires above δ = 1e+09 (`missing.delta`) in any of its 4 rows" in said
    assert "`missing.min_support` asks for 2 rows" in said and "Lower missing.delta" in said


def test_a_seed_that_fires_all_is_said_to_by_set_difference(complaint: Complain) -> None:
    said = complaint(FOUR, {"s0": {1: 5.0, 2: 3.0}}, delta=1.0, test="set_difference")
    assert "the seed (1 row) fires each of the 2 features that the anchor (4 rows) fires in at least 2 rows" in said
    assert "allow_empty: true" in said


def test_the_rate_test_is_not_said_to_prove_that_the_seed_fires_all(complaint: Complain) -> None:
    """Four rows against one are too few for Fisher's test, though the seed never fires feature 2."""
    said = complaint(FOUR, BARE, delta=1.0)
    assert "fires none of the 2 features tested more rarely than the anchor (4 rows) by the rate test" in said
    assert "though it never fires 1 of them" in said and "`missing.test: set_difference` counts" in said
    assert "fires every feature" not in said
