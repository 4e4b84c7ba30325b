from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field

from headwater.core.errors import ConfigError
from headwater.flows.recipe import validate


class Left(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: str = "left"
    weight: float = Field(1.0, ge=0)


class Right(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")

    needed: int
    side: Left | Right | None = None
    parts: dict[str, Right] = {}
    items: list[Left] = []


def problem(**values: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(Whole, values, "r.yaml")
    return caught.value


def test_an_unknown_key_is_named_with_a_guess_and_the_keys_that_are_known() -> None:
    error = problem(needed=1, sid={})

    assert error.what == "Unknown key 'sid' in r.yaml."
    assert error.todo == "Did you mean 'side'? Known keys there: items, needed, parts, side."
    assert error.exit_code == 2


def test_an_unknown_key_deep_inside_is_named_by_its_path_and_its_own_neighbours() -> None:
    error = problem(needed=1, items=[{"weight": 1}, {"wieght": 2}])

    assert "'items.1.wieght'" in error.what
    assert "Did you mean 'weight'? Known keys there: kind, weight." in error.todo


def test_keys_of_a_mapping_chosen_by_the_user_lead_to_the_keys_below_them() -> None:
    error = problem(needed=1, parts={"gpt-4.1": {"siz": 3}})

    assert "'parts.gpt-4.1.siz'" in error.what
    assert "Did you mean 'size'?" in error.todo


def test_a_misspelt_required_key_is_reported_as_unknown_rather_than_as_missing() -> None:
    error = problem(neded=1)

    assert error.what == "Unknown key 'neded' in r.yaml."
    assert error.todo.endswith("1 more key is wrong too.")


def test_a_missing_key_says_so() -> None:
    assert problem().what == "Key 'needed' is missing in r.yaml."


def test_a_wrong_type_names_the_key_and_what_was_written() -> None:
    error = problem(needed="many")

    assert error.what.startswith("Key 'needed' in r.yaml: ")
    assert "valid integer" in error.what
    assert "(it is 'many')" in error.what


def test_tags_that_pydantic_adds_for_unions_are_not_shown_as_keys() -> None:
    error = problem(needed=1, side={"weight": -1})

    assert "'side.weight'" in error.what


def test_a_value_under_the_name_of_a_secret_is_not_repeated() -> None:
    class WithKey(BaseModel):
        api_key: int

    with pytest.raises(ConfigError) as caught:
        validate(WithKey, {"api_key": "hunter2-hunter2"}, "r.yaml")

    assert "hunter2" not in str(caught.value)
