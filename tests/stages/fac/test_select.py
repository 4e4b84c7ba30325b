"""Selection: every generated text is kept or rejected for one named reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.errors import PermanentError
from headwater.core.store import StageOutput
from headwater.stages.emit.dataset import Dataset, DatasetConfig
from headwater.stages.fac.select import CopyCheck, Select, SelectConfig

LONG = "please convert the following list of seven temperatures from celsius into fahrenheit degrees"


@pytest.fixture
def inputs(tables: Any) -> dict[str, StageOutput]:
    features = {3: ["anchor three"], 5: ["anchor five"], 8: ["anchor eight"]}
    texts = {
        "t1": ("p1", "a strong text about rivers and their sources"),
        "t2": ("p1", "a strong text about rivers and their source"),
        "t3": ("p2", f"Hello, {LONG.upper()}!"),
        "t4": ("p2", "nothing fires here at all"),
        "t5": ("p2", "a weaker text about mountains in winter"),
        "t6": ("p2", "one more text, on trains that run late at night"),
        "t7": ("p2", "fires both of the features very strongly indeed"),
        "t8": ("p1", "written for three, but it happens to be about owls"),
    }
    fires: dict[str, dict[int, float]] = {
        "t1": {3: 5.0},
        "t2": {3: 4.0},
        "t3": {5: 9.0},
        "t4": {5: 1.0, 9: 8.0},
        "t5": {3: 2.0},
        "t6": {3: 1.5},
        "t7": {3: 6.0, 5: 3.0},
        "t8": {8: 2.5},
    }
    return {
        "targets": tables.targets(features, {3, 5}),
        "facts": tables.missing(features),
        "anchor": tables.loaded("anchor", [LONG]),
        "seed": tables.loaded("seed", ["a seed text"]),
        "prompts.1": tables.prompts(1, {"p1": 3, "p2": 5}),
        "texts.1": tables.texts(1, texts),
        "features.1": tables.features("1", fires),
    }


def test_every_text_is_kept_or_rejected_for_its_reason(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    output = run(Select(SelectConfig(per_feature=2)), inputs)
    kept = {row["source"]: row for row in output.read().iter_rows(named=True)}
    reasons = {row["id"]: row["reason"] for row in output.rejects().iter_rows(named=True)}
    assert reasons == {
        "t2": "near_duplicate",
        "t3": "copies_source",
        "t4": "fires_no_missing_feature",
        "t6": "over_budget",
    }
    assert set(kept) == {"t1", "t5", "t7", "t8"}
    assert output.manifest["counts"] == {"attempted": 8, "accepted": 4, "rejected": 4, "owed": 0}


def test_a_text_that_fires_a_missing_feature_nobody_aimed_at_serves_that_one(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    output = run(Select(SelectConfig()), inputs)
    rows = {row["source"]: row for row in output.read().iter_rows(named=True)}
    assert rows["t8"]["feature"] == 8 and rows["t8"]["fires"] == [8]
    assert output.metrics["steps"]["1"]["fire_a_missing_feature"] == 7
    assert output.metrics["features_served"] == 3


def test_rows_say_when_a_text_was_cleaned(run: Callable[..., StageOutput], inputs: dict[str, StageOutput]) -> None:
    assert set(run(Select(SelectConfig()), inputs).read()["cleaned"]) == {False, True}


def test_a_row_that_fires_several_features_goes_to_the_one_with_the_fewest_candidates(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput]
) -> None:
    rows = {row["source"]: row for row in run(Select(SelectConfig(per_feature=2)), inputs).read().iter_rows(named=True)}
    assert rows["t7"]["feature"] == 5
    assert rows["t7"]["activation"] == 3.0
    assert rows["t7"]["fires"] == [3, 5]


def test_rows_name_their_parents(run: Callable[..., StageOutput], inputs: dict[str, StageOutput]) -> None:
    rows = {row["source"]: row for row in run(Select(SelectConfig()), inputs).read().iter_rows(named=True)}
    assert rows["t1"]["parents"] == ["t1", "shown-p1"]


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("the quick brown fox jumps over the lazy dog today", True),
        ("A quick, brown fox -- jumps over THE lazy cat", False),
        ("quick brown fox", True),
        ("quick red fox", False),
        ("", False),
    ],
)
def test_a_copy_shares_n_words_in_a_row_or_stands_whole_in_a_reference(text: str, copy: bool) -> None:
    assert CopyCheck(["The quick brown fox jumps over the lazy dog"], 8).is_copy(text) is copy


def test_a_copy_is_found_in_a_script_without_spaces() -> None:
    copies = CopyCheck(["请给我写一首关于春天的短诗，不要超过四行。"], 8)
    assert copies.is_copy("老师，请给我写一首关于春天的短诗好吗？")
    assert not copies.is_copy("老师，请给我写一封关于冬天的长信好吗？")


def test_a_dataset_of_nothing_says_that_no_text_fired_what_was_missing(
    run: Callable[..., StageOutput], inputs: dict[str, StageOutput], tables: Any
) -> None:
    """As at a temperature at which a model writes noise."""
    noise = inputs | {"features.1": tables.features("1", {f"t{n}": {9: 5.0} for n in range(1, 9)})}
    chosen = run(Select(SelectConfig()), noise)
    assert chosen.rows == 0
    with pytest.raises(
        PermanentError, match=r"kept 0 of 8 \(fires_no_missing_feature 8\).*rows RUN --stage .*--rejects"
    ):
        run(Dataset(DatasetConfig()), {"rows": chosen})
