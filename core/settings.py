"""Settings: what a person may write in a recipe, section by section, held to one standard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

_MOST = 2**31 - 1
"""Tokens, features and samples are counted in int32 columns."""


class Settings(BaseModel):
    """Base of recipes, their sections, and the configs of stages and engines; frozen.

    An unknown key is an error. So is a number that JSON cannot hold, `true` in place of a number, and an integer beyond
    32 bits where the field has no upper bound of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        kinds = set(_kinds(field.annotation))
        if not kinds & {int, float}:
            return handler(value)
        if bool not in kinds and any(type(item) is bool for item in _items(value)):
            raise ValueError("input should be a number, not true or false")
        checked = handler(value)
        bounded = any(hasattr(constraint, "le") or hasattr(constraint, "lt") for constraint in field.metadata)
        if not bounded and any(type(item) is int and abs(item) > _MOST for item in _items(checked)):
            raise ValueError(f"input should be less than or equal to {_MOST}")
        return checked


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of: int and None of `int | None`."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _kinds(part)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _items(item)
    else:
        yield value
