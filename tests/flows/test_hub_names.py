"""A licence or a language that the Hub would refuse is refused in the recipe, by its key and with a guess."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.core.errors import ConfigError
from headwater.data_cards.licences import LICENCES
from headwater.flows.fac_synthesis import FacSynthesis
from headwater.pipelines.recipes import build


def _built(**dataset: Any) -> FacSynthesis:
    sources = {"anchor": {"source": "a.jsonl"}, "seed_data": {"source": "s.jsonl"}}
    recipe = build({"flow": "fac-synthesis", "pipeline": "p", **sources, "dataset": dataset}, "r.yaml")
    assert isinstance(recipe, FacSynthesis)
    return recipe


def _complaint(**dataset: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _built(**dataset)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", ["apache-2.0", "cc-by-sa-4.0", "openrail++", "llama3.1", "unknown", "other"])
def test_a_licence_that_the_hub_knows_is_taken(name: str) -> None:
    assert _built(license=name).dataset.license == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Apache-2.0", "apache-2.0"),
        ("Apache 2.0", "apache-2.0"),
        ("MIT", "mit"),
        ("CC_BY_4.0", "cc-by-4.0"),
        ("cc-by-sa", "cc-by-sa-4.0"),
        ("gpl-3", "gpl-3.0"),
    ],
)
def test_a_near_miss_of_a_licence_is_guessed(name: str, meant: str) -> None:
    said = _complaint(license=name)
    assert said.startswith("Key 'dataset.license' in r.yaml: the Hub knows no licence by this name.")
    assert f"Did you mean {meant!r}?" in said and f"(it is {name!r})" in said


def test_a_licence_of_ones_own_is_led_to_other() -> None:
    assert "write `other`, with `license_name` and `license_link`" in _complaint(license="My Own Licence")
    own = {"license": "other", "license_name": "house-rules-1.0", "license_link": "https://example.org/rules"}
    assert _built(**own).dataset.license_link == own["license_link"]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"license": "mit", "license_name": "mine"}, "go with `license: other` alone"),
        ({"license_link": "/home/me/LICENSE"}, "`license_link` is `LICENSE`, `LICENSE.md` or a URL"),
    ],
)
def test_name_and_link_go_with_other_and_lead_somewhere(dataset: dict[str, str], said: str) -> None:
    complaint = _complaint(**dataset)
    assert complaint.startswith("Key 'dataset' in r.yaml: ") and said in complaint


@pytest.mark.parametrize("code", ["en", "yue", "no", "code", "multilingual"])
def test_a_language_code_is_taken(code: str) -> None:
    assert _built(language=["de", code]).dataset.language == ("de", code)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("english", "en"),
        ("German", "de"),
        ("EN", "en"),
        ("en-US", "en"),
        ("zh_Hant", "zh"),
        ("japanes", "ja"),
        ("multi-lingual", "multilingual"),
    ],
)
def test_a_language_written_in_another_way_is_refused_with_its_code(written: str, meant: str) -> None:
    said = _complaint(language=["en", written])
    assert said.startswith("Key 'dataset.language.1' in r.yaml: the Hub knows no such language.")
    assert f"Did you mean {meant!r}?" in said


def test_a_word_like_no_language_gets_no_guess() -> None:
    assert "Did you mean" not in _complaint(language=["q7"])


def test_a_bare_no_is_explained() -> None:
    assert "write 'no' in quotes for Norwegian" in _complaint(language=[False])


def test_the_licence_of_a_source_is_free_text_for_it_stands_in_the_cards_text_alone() -> None:
    source = {"source": "a.jsonl", "license": "Bought from Example Inc., see contract"}
    recipe = build({"flow": "fac-synthesis", "pipeline": "p", "anchor": source, "seed_data": source}, "r.yaml")
    assert isinstance(recipe, FacSynthesis) and recipe.anchor.license == source["license"]


def test_the_list_of_licences_is_sorted_and_names_each_once() -> None:
    assert list(LICENCES) == sorted(set(LICENCES))
