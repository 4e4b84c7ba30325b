"""Recipes: what a person may write about a pipeline, as frozen models that refuse unknown keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from headwater.core.errors import ConfigError
from headwater.core.meter import Price
from headwater.core.settings import Settings
from headwater.flows.suggest import did_you_mean

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.data_cards.card import DatasetCard
    from headwater.data_cards.report import Report
    from headwater.flows.graph import Graph
    from headwater.flows.runs import Run

_SHOWN_CHARACTERS = 60


class Recipe(Settings):
    """Base of every pipeline's recipe."""

    flow: ClassVar[str]
    """Name of the flow that this kind of recipe drives."""

    pipeline: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """The recipe's own name: the folder its runs go to."""
    title: str = ""
    """One line for `pipeline list`."""
    seed: int = Field(0, ge=0, lt=2**63)
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

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, `flow` included: written down, it is a recipe that runs the same again."""
        return {"flow": self.flow, **self.model_dump(mode="json")}


RecipeT = TypeVar("RecipeT", bound=BaseModel)


def validate(kind: type[RecipeT], values: Mapping[str, Any], source: str) -> RecipeT:
    """The recipe, or a ConfigError that names the first wrong key, what is wrong with it, and what is allowed.

    An unknown key comes before a missing one, which is often the same key misspelt.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    key = ".".join(_path(first, values)) or "(top level)"
    if first["type"] == "extra_forbidden":
        known = _known_keys(kind, first["loc"])
        what = f"Unknown key {key!r} in {source}."
        todo = f"{did_you_mean(str(first['loc'][-1]), known)}Known keys there: {', '.join(known)}."
    elif first["type"] == "missing":
        what = f"Key {key!r} is missing in {source}."
        todo = "Add it to the recipe, or give it with --set."
    else:
        what = f"Key {key!r} in {source}: {_reason(first)}{_given(key, first['input'])}."
        todo = "Write another value there."
    if len(problems) > 1:
        more = len(problems) - 1
        todo += f" {more} more {'key is' if more == 1 else 'keys are'} wrong too."
    raise ConfigError(what, todo=todo)


def _path(problem: ErrorDetails, values: Any) -> list[str]:
    """The problem's location without the tags that pydantic adds for unions: only keys a person wrote or must write."""
    path: list[str] = []
    location = problem["loc"]
    for i, part in enumerate(location):
        there = (isinstance(values, Mapping) and part in values) or (isinstance(values, list) and isinstance(part, int))
        if there:
            values = values[part]
            path.append(str(part))
        elif i == len(location) - 1 and problem["type"] == "missing":
            path.append(str(part))
    return path


def _reason(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return text[:1].lower() + text[1:]


def _given(key: str, value: Any) -> str:
    """What was written there; never the value of something that may be a credential."""
    from headwater.core.redact import redact_values

    if isinstance(value, Mapping):
        return ""
    name = key.rpartition(".")[2]
    text = repr(redact_values({name: value})[name])
    return f" (it is {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '…'})"


def _known_keys(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    models: list[type[BaseModel]] = [kind]
    for part in location[:-1]:
        fields = [model.model_fields[str(part)] for model in models if str(part) in model.model_fields]
        if fields:
            models = [model for field in fields for model in _models(field.annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
