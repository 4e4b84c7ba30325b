"""A row that cannot be shown to the model is named as a row, whichever stage meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.core.errors import ConfigError
from headwater.core.rows import MESSAGES, schema
from headwater.core.store import StageOutput
from headwater.llm.registry import EngineConfig
from headwater.sae.config import SaeTrainConfig
from headwater.stages.fac import features
from headwater.stages.fac.clusters import Clusters, ClustersConfig
from headwater.stages.fac.features import Features, FeaturesConfig
from headwater.stages.fac.sae import TrainSae, TrainSaeConfig

RunStage = Callable[..., StageOutput]
GOOD = {f"good-{n}": [{"role": "assistant", "content": text}] for n, text in enumerate(("one", "two", "three", "four"))}
LONG = {"long": [{"role": "user", "content": "word " * 9000}, {"role": "assistant", "content": "yes"}]}
NAMED = r"Row 'long' \(it begins with 'word word .*'\) has \d+ tokens; the model's context holds 8192"


@pytest.fixture
def cut(embedded_cache: Path) -> dict[str, Any]:
    from headwater.llm.embedded import embedded_model_folder

    model = EngineConfig(engine="transformers", model=str(embedded_model_folder(embedded_cache)))
    return {"model": model, "layer": 0, "roles": ("assistant",)}


@pytest.fixture
def chats(make_output: Callable[..., StageOutput]) -> Callable[..., StageOutput]:
    def make(rows: dict[str, Any]) -> StageOutput:
        return make_output("load", schema(messages=MESSAGES), [{"id": key, "messages": m} for key, m in rows.items()])

    return make


def test_features_name_the_row_beyond_the_rows_read_first(
    run: RunStage, chats: RunStage, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = run(Clusters(ClustersConfig(**cut, clusters=2)), {"anchor": chats(GOOD)})
    monkeypatch.setattr(features, "_ROWS_AT_ONCE", 2)
    with pytest.raises(ConfigError, match=NAMED):
        run(Features(FeaturesConfig(**cut)), {"rows": chats(GOOD | LONG), "space": space})


def test_clusters_name_the_row(run: RunStage, chats: RunStage, cut: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=NAMED):
        run(Clusters(ClustersConfig(**cut)), {"anchor": chats(GOOD | LONG)})


def test_training_names_the_row_of_its_second_table(run: RunStage, chats: RunStage, cut: dict[str, Any]) -> None:
    stage = TrainSae(TrainSaeConfig(**cut, train=SaeTrainConfig(width=64, k=2)))
    with pytest.raises(ConfigError, match=NAMED):
        run(stage, {"anchor": chats(GOOD), "seed": chats(LONG)})
