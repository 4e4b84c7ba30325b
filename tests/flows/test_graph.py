from __future__ import annotations

from collections.abc import Mapping

import pytest
from tiny_flow import Count, CountConfig, Keep, Square, SquareConfig

from headwater.core.errors import ConfigError
from headwater.flows.graph import Graph, Node
from headwater.stages.base import Forecast, StageConfig

COUNT = Node("count", Count(CountConfig(rows=5)))
SQUARE = Node("square", Square(SquareConfig()), {"rows": "count"})
KEEP = Node("keep", Keep(StageConfig()), {"rows": "square"})


def test_a_graph_yields_its_nodes_in_running_order() -> None:
    graph = Graph((COUNT, SQUARE, KEEP), dataset="keep")

    assert [node.name for node in graph] == ["count", "square", "keep"]
    assert graph["square"] is SQUARE


def test_a_node_can_read_only_what_comes_before_it() -> None:
    with pytest.raises(ConfigError, match="'square' reads 'count', which does not come before it"):
        Graph((SQUARE, COUNT), dataset="square")


def test_two_nodes_cannot_share_a_name() -> None:
    with pytest.raises(ConfigError, match="Two nodes are called 'count'"):
        Graph((COUNT, COUNT), dataset="count")


def test_a_stage_that_needs_a_column_its_input_lacks_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"'keep' needs the columns \['square'\] of its input 'rows'"):
        Graph((COUNT, Node("keep", Keep(StageConfig()), {"rows": "count"})), dataset="keep")


def test_a_stage_without_its_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="'square' has no input 'rows'"):
        Graph((COUNT, Node("square", Square(SquareConfig()))), dataset="square")


def test_the_dataset_must_be_a_node() -> None:
    with pytest.raises(ConfigError, match="'nothing' is not in the graph"):
        Graph((COUNT,), dataset="nothing")


def test_a_forecast_goes_down_the_graph_and_prefers_rows_that_are_known() -> None:
    graph = Graph((COUNT, SQUARE, KEEP), dataset="keep")

    assert [f.rows for f in graph.forecast({}).values()] == [5, 5, 5]
    assert graph.forecast({"square": 3})["keep"].rows == 3


def test_the_size_of_a_node_is_its_largest_input_or_what_it_makes() -> None:
    assert COUNT.size({"count": 5}) == 5
    assert KEEP.size({"count": 5, "square": 4, "keep": 2}) == 4


class Picky(Count):
    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        raise ConfigError(self.config.file or "", todo="Mend it.")


def _complaint(file: str, *keys: str) -> str:
    graph = Graph((Node("count", Picky(CountConfig(file=file)), keys=keys),), dataset="count")
    with pytest.raises(ConfigError) as caught:
        graph.forecast({})
    return str(caught.value)


def test_an_error_about_what_a_person_wrote_names_the_stage_and_the_keys_to_look_at() -> None:
    assert _complaint("No file.", "a", "b.c") == "Stage count (the recipe's `a` and `b.c`): No file. Mend it."
    assert _complaint("No file.") == "Stage count: No file. Mend it."
    assert _complaint("Key 'a.file': no file.", "a") == "Key 'a.file': no file. Mend it."
