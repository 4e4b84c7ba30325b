"""Which recipe class drives which flow. Classes are imported only when their flow is asked for.

An installed package adds a flow with an entry point in the group `headwater.flows`: `name = "package.module:Class"`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.flows.suggest import did_you_mean

if TYPE_CHECKING:
    from headwater.flows.recipe import Recipe

ENTRY_POINT_GROUP = "headwater.flows"

_BUILT_IN = {"fac-synthesis": "headwater.flows.fac_synthesis:FacSynthesis"}


def flow_names() -> list[str]:
    """Every flow a recipe's `flow:` key may name."""
    return sorted(_BUILT_IN.keys() | _plugged_in().keys())


def recipe_class(flow: str) -> type[Recipe]:
    """The recipe class of `flow`. Raises ConfigError for an unknown name or one that can't be imported."""
    target = _BUILT_IN.get(flow) or _plugged_in().get(flow)
    if target is None:
        names = flow_names()
        raise ConfigError(f"Unknown flow {flow!r}.", todo=f"{did_you_mean(flow, names)}There are: {', '.join(names)}.")
    module, _, name = target.partition(":")
    try:
        found: type[Recipe] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The flow {flow!r} could not be loaded from {target}: {error}.",
            todo="Install what it needs, or mend the entry point of the package that provides it.",
        ) from error
    return found


def _plugged_in() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
