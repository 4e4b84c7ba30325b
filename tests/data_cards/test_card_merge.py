"""Updating a card keeps what people wrote and renews what Headwater wrote."""

from __future__ import annotations

import pytest
import yaml
from card_samples import make_card

from headwater.core.errors import ConfigError
from headwater.data_cards.card import Split, merge_card, render_card

OLD = render_card(make_card())
NEW = render_card(make_card(fingerprint="e" * 64, licence="mit", title="A newer title"))


def front(card: str) -> dict[str, object]:
    loaded = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(loaded, dict)
    return loaded


def edit(card: str, old: str, new: str) -> str:
    assert card.count(old) == 1
    return card.replace(old, new)


def test_without_an_existing_card_the_new_one_stands() -> None:
    assert merge_card(None, NEW) == NEW
    assert merge_card(" \n", NEW) == NEW


def test_an_untouched_card_is_replaced_as_a_whole() -> None:
    assert merge_card(OLD, NEW) == NEW


def test_merging_again_changes_nothing() -> None:
    edited = edit(OLD, "license: apache-2.0", "license: cc-by-4.0") + "\n## My notes\n"
    once = merge_card(edited, NEW)
    assert merge_card(once, NEW) == once
    assert merge_card(NEW, NEW) == NEW


def test_text_before_and_after_the_section_is_kept_to_the_letter() -> None:
    before, after = "# By hand\n\nCaf\\1 é \\g<0>\n\n", "\n## Citation\n\n  indented | text\n"
    edited = edit(OLD, "<!-- headwater:begin", before + "<!-- headwater:begin") + after
    merged = merge_card(edited, NEW)
    assert before + "<!-- headwater:begin" in merged
    assert merged.endswith("<!-- headwater:end -->\n" + after)
    assert "e" * 64 in merged
    assert "f" * 64 not in merged


def test_a_card_that_never_was_ours_keeps_its_text_and_its_metadata() -> None:
    written = "---\nlicense: cc-by-4.0\nannotations_creators: [expert-generated]\ntags: [mine]\n---\n# Mine\n\nHello.\n"
    merged = merge_card(written, NEW)
    data = front(merged)
    assert data["license"] == "cc-by-4.0"
    assert data["annotations_creators"] == ["expert-generated"]
    assert data["tags"] == ["mine", "synthetic", "headwater"]
    assert data["size_categories"] == ["n<1K"]
    assert "# Mine\n\nHello.\n\n<!-- headwater:begin" in merged


def test_a_card_without_a_metadata_block_gets_one() -> None:
    merged = merge_card("Just a sentence.\n", NEW)
    assert front(merged) == front(NEW)
    assert "\nJust a sentence.\n\n<!-- headwater:begin" in merged


def test_a_value_changed_by_hand_is_kept_and_one_of_ours_is_renewed() -> None:
    data = front(merge_card(edit(OLD, "license: apache-2.0", "license: cc-by-4.0"), NEW))
    assert data["license"] == "cc-by-4.0"
    assert data["pretty_name"] == "A newer title"


def test_a_value_changed_by_hand_survives_two_updates() -> None:
    edited = edit(OLD, "license: apache-2.0", "license: cc-by-4.0")
    assert front(merge_card(merge_card(edited, NEW), OLD))["license"] == "cc-by-4.0"


def test_what_describes_the_files_is_always_renewed() -> None:
    table = make_card().tables[0]
    grown = table.model_copy(
        update={"splits": (Split(name="train", path="data/*.parquet", rows=5000, bytes=9, arrow_bytes=9),)}
    )
    new = render_card(make_card(tables=(grown,)))
    merged = front(merge_card(edit(OLD, "num_examples: 7", "num_examples: 8"), new))
    assert merged["dataset_info"] == front(new)["dataset_info"]
    assert merged["size_categories"] == ["1K<n<10K"]


def test_configurations_of_others_are_kept() -> None:
    theirs = "- config_name: extra\n  data_files: extra/*.parquet\n"
    edited = edit(OLD, "dataset_info:\n", theirs + "dataset_info:\n")
    configs = front(merge_card(edited, NEW))["configs"]
    assert isinstance(configs, list)
    assert [config["config_name"] for config in configs] == ["default", "extra"]


def test_windows_line_ends_in_the_existing_card_are_understood() -> None:
    merged = merge_card("---\r\nlicense: mit\r\n---\r\nText.\r\n", OLD)
    assert front(merged)["license"] == "mit"
    assert merged.count("---\n") == 2


def test_an_empty_metadata_block_is_understood() -> None:
    assert front(merge_card("---\n---\nText.\n", NEW)) == front(NEW)


def test_a_recipe_that_contains_our_markers_does_not_break_the_next_update() -> None:
    tricky = render_card(make_card(recipe={"prompt": "<!-- headwater:end --> <!-- headwater:begin -->"}))
    assert merge_card(tricky, NEW) == NEW


@pytest.mark.parametrize(
    "damaged",
    [
        OLD.replace("<!-- headwater:end -->", ""),
        OLD + "\n<!-- headwater:end -->\n",
        "<!-- headwater:end -->\ntext\n<!-- headwater:begin -->\n",
    ],
)
def test_damaged_markers_are_an_error_rather_than_lost_text(damaged: str) -> None:
    with pytest.raises(ConfigError, match="markers"):
        merge_card(damaged, NEW)


@pytest.mark.parametrize("block", ["license: [mit", "- a list"])
def test_a_metadata_block_that_is_not_a_mapping_is_an_error(block: str) -> None:
    with pytest.raises(ConfigError, match="YAML block"):
        merge_card(f"---\n{block}\n---\nText.\n", NEW)
