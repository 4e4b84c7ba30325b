"""What every recipe, section and config refuses, whatever its own fields say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field, JsonValue, ValidationError

from headwater.core.settings import Settings


class Knobs(Settings):
    count: int = Field(1, ge=0)
    most: int | None = None
    share: float = 0.5
    steps: tuple[int, ...] = ()
    seed: int = Field(0, lt=2**63)
    draft: bool = False
    either: bool | int = 0
    body: dict[str, JsonValue] = Field(default_factory=dict)


@pytest.mark.parametrize(
    "value",
    [
        {"count": True},
        {"most": False},
        {"share": True},
        {"steps": [1, True]},
        {"count": 2**31},
        {"most": -(10**20)},
        {"count": str(10**20)},
        {"steps": [1, 10**20]},
        {"seed": 2**63},
        {"share": float("inf")},
        {"conut": 1},
    ],
)
def test_what_is_no_number_or_no_column_can_hold_is_refused_by_its_key(value: dict[str, Any]) -> None:
    (key,) = value
    with pytest.raises(ValidationError) as caught:
        Knobs.model_validate(value)
    assert {problem["loc"][0] for problem in caught.value.errors()} == {key}


@pytest.mark.parametrize(
    "value",
    [
        {"count": 2**31 - 1},
        {"count": "7"},
        {"most": None},
        {"share": 1},
        {"steps": [1, 2]},
        {"seed": 2**63 - 1},
        {"draft": True},
        {"either": True},
        {"body": {"think": True, "n": 10**20}},
    ],
)
def test_everything_else_is_taken(value: dict[str, Any]) -> None:
    Knobs.model_validate(value)
