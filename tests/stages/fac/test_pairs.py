"""Step two: which candidate is the strong example, which the weak one, and when the anchor stands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.store import StageOutput
from headwater.stages.fac.pairs import Pairs, PairsConfig

ANCHOR = {3: ["an anchor text for three"], 5: ["an anchor text for five"], 7: ["an anchor text for seven"]}


@pytest.fixture
def inputs(tables: Any) -> dict[str, StageOutput]:
    """Feature 3 is fired by its own candidate a2; feature 5 only by a candidate of 3; feature 7 by nobody."""
    written = {"p1": 3, "p2": 3, "p3": 5, "p4": 5, "p5": 7}
    texts = {f"a{n}": (f"p{n}", f"candidate {n}") for n in range(1, 6)}
    fires: dict[str, dict[int, float]] = {
        "a1": {3: 0.5, 5: 4.0},
        "a2": {3: 2.0},
        "a3": {5: 0.9},
        "a4": {},
        "a5": {7: 1.0},
    }
    return {
        "targets": tables.targets(ANCHOR, ANCHOR),
        "facts": tables.missing(ANCHOR),
        "prompts": tables.prompts(1, written),
        "candidates": tables.texts(1, texts),
        "features": tables.features("1", fires),
    }


def _pairs(output: StageOutput) -> dict[int, tuple[str, str | None, bool]]:
    return {row["feature"]: (row["good"], row["bad"], row["fallback"]) for row in output.read().iter_rows(named=True)}


def test_pooled_scoring_lets_a_candidate_serve_another_feature(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    output = run(Pairs(PairsConfig(source="pooled", generations=1)), inputs)
    assert _pairs(output) == {
        3: ("candidate 2", "candidate 1", False),
        5: ("candidate 1", "candidate 4", False),
        7: ("an anchor text for seven", "candidate 5", True),
    }
    assert output.metrics["fallback_share"] == pytest.approx(1 / 3)
    assert output.metrics["fallback_share_own"] == pytest.approx(2 / 3)
    assert output.metrics["fallback_share_pooled"] == pytest.approx(1 / 3)


def test_own_candidates_alone_fall_back_to_the_anchor_more_often(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    pairs = _pairs(run(Pairs(PairsConfig(source="own", generations=1)), inputs))
    assert pairs[5] == ("an anchor text for five", "candidate 4", True)
    assert pairs[3] == ("candidate 2", "candidate 1", False)


def test_the_anchor_row_control_shows_no_pair(run: Callable[..., StageOutput], inputs: dict[str, StageOutput]) -> None:
    output = run(Pairs(PairsConfig(source="anchor_row", generations=2)), inputs)
    assert set(_pairs(output).values()) == {(texts[0], None, True) for texts in ANCHOR.values()}
    assert output.rows == 6


def test_a_value_at_delta_does_not_fire(run: Callable[..., StageOutput], inputs: dict[str, StageOutput]) -> None:
    """Candidate 5 reaches feature 7 with exactly δ = 1.0: g_i(x) > δ is strict."""
    assert _pairs(run(Pairs(PairsConfig(generations=1)), inputs))[7][2] is True


def test_the_weak_example_reaches_the_prompt_only_with_contrast(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    for contrast in (True, False):
        output = run(Pairs(PairsConfig(contrast=contrast, generations=1)), inputs)
        prompts = [str(row["prompt"]) for row in output.read().iter_rows(named=True) if row["feature"] == 3]
        assert all("candidate 2" in prompt for prompt in prompts)
        assert all(("candidate 1" in prompt) is contrast for prompt in prompts)
