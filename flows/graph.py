"""A pipeline as a graph of stages: nodes in the order in which they run, and what each one reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import ConfigError
from headwater.stages.base import Forecast, Stage
from headwater.stages.run import check_columns


@dataclass(frozen=True)
class Node:
    """A stage at its place in a pipeline."""

    name: str
    """Unique within the graph, such as `features.anchor`."""
    stage: Stage[Any]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The stage's input name → the node that feeds it."""
    keys: tuple[str, ...] = ()
    """The keys of the recipe that say what it does."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error about what a person wrote says which node met it and which keys of the recipe to look at."""
        try:
            yield
        except ConfigError as error:
            if error.what.startswith("Key '"):
                raise
            told = " and ".join(f"`{key}`" for key in self.keys)
            where = f"Stage {self.name}" + (f" (the recipe's {told})" if told else "")
            raise ConfigError(f"{where}: {error.what}", todo=error.todo) from error

    def size(self, rows: Mapping[str, int]) -> int:
        """How much work the node is, in rows: its largest input, or what it makes when it has none.

        `rows` holds the row counts of all nodes.
        """
        return max((rows[source] for source in self.inputs.values()), default=rows.get(self.name, 0))


@dataclass(frozen=True)
class Graph:
    """Nodes in running order. Building one checks every connection and every column."""

    nodes: tuple[Node, ...]
    dataset: str
    """The node whose rows are the dataset."""

    def __post_init__(self) -> None:
        columns: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            if node.name in columns:
                raise ConfigError(f"Two nodes are called {node.name!r}.", todo="Give every node its own name.")
            for source in node.inputs.values():
                if source not in columns:
                    raise ConfigError(f"Node {node.name!r} reads {source!r}, which does not come before it.")
            check_columns(node.stage, node.name, {name: columns[source] for name, source in node.inputs.items()})
            columns[node.name] = tuple(node.stage.output.names)
        if self.dataset not in columns:
            raise ConfigError(f"The dataset node {self.dataset!r} is not in the graph.")

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def forecast(self, known_rows: Mapping[str, int]) -> dict[str, Forecast]:
        """What each node would cost. `known_rows` holds the row counts of nodes that are already there."""
        forecasts: dict[str, Forecast] = {}
        for node in self.nodes:
            rows = {name: known_rows.get(source, forecasts[source].rows) for name, source in node.inputs.items()}
            with node.named():
                forecasts[node.name] = node.stage.forecast(rows)
        return forecasts
