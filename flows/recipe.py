"""Recipes: what a person may write about a pipeline, as frozen models that refuse unknown keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwater.core.errors import ConfigError
from headwater.core.meter import Price

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.data_cards.card import DatasetCard
    from headwater.data_cards.report import Report
    from headwater.flows.graph import Graph
    from headwater.flows.runs import Run


class Recipe(BaseModel):
    """Base of every pipeline's recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow: ClassVar[str]
    """Name of the flow that this kind of recipe drives."""

    pipeline: str
    """The recipe's own name: the folder its runs go to."""
    title: str = ""
    """One line for `pipeline list`."""
    seed: int = 0
    """Every random draw of the run derives from it."""
    prices: dict[str, Price] = Field(default_factory=dict)
    """Model name → dollars per million tokens; changes no row."""
    allow_empty: bool = False
    """Whether a dataset without rows is an acceptable result (exit code 0)."""

    @abstractmethod
    def graph(self) -> Graph:
        """The stages of this recipe in running order."""

    @abstractmethod
    def card(self, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
        """The facts of the data card."""

    @abstractmethod
    def report(self, run: Run, outputs: Mapping[str, StageOutput]) -> Report:
        """The facts of the report."""


RecipeT = TypeVar("RecipeT", bound=BaseModel)


def validate(kind: type[RecipeT], values: Mapping[str, Any], source: str) -> RecipeT:
    """The recipe, or a ConfigError that names the first wrong key, what is wrong with it, and what is allowed."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        first = problems[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        if first["type"] == "extra_forbidden":
            what = f"Unknown key {key!r} in {source}."
            todo = f"Known keys there: {', '.join(_known_keys(kind, first['loc']))}."
        else:
            what = f"Key {key!r} in {source}: {first['msg']} (it is {first['input']!r})."
            todo = "See `pipeline show` for the resolved recipe and the defaults."
        if len(problems) > 1:
            todo += f" {len(problems) - 1} more key(s) are wrong too."
        raise ConfigError(what, todo=todo) from error


def _known_keys(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    model: Any = kind
    for part in location[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            continue
        model = next(
            (a for a in _annotations(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)), model
        )
    return sorted(getattr(model, "model_fields", {}))


def _annotations(annotation: Any) -> list[Any]:
    from typing import get_args

    found = [annotation]
    for inner in get_args(annotation):
        found += _annotations(inner)
    return found
