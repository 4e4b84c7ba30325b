"""A control: clusters of the anchor's mean-pooled hidden states take the place of SAE features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from headwater.core.rows import row_id
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.registry import EngineConfig
from headwater.stages.base import StageConfig, StageContext, TableStage
from headwater.stages.fac.chats import Chats
from headwater.stages.fac.features import local_engine
from headwater.stages.fac.sae import SPACE_SCHEMA
from headwater.stages.fac.space_artifact import CLUSTERS_FOLDER


class ClustersConfig(StageConfig):
    model: EngineConfig
    layer: int = Field(ge=0)
    max_tokens: int = Field(256, ge=1)
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)
    clusters: int = Field(48, ge=2)


class Clusters(TableStage[ClustersConfig]):
    """Spherical k-means; each row then fires exactly one "feature", its nearest cluster."""

    name: ClassVar[str] = "clusters"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"anchor": ("id", "messages")}

    @property
    def output(self) -> pa.Schema:
        return SPACE_SCHEMA

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"model": self.config.model}

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        from headwater.sae.clusters import fit_clusters, mean_pooled

        config = self.config
        engine = local_engine(context, config.model)
        chats = Chats.of(inputs["anchor"].read())
        batches = engine.hidden_states(chats.messages, config.layer, max_tokens=config.max_tokens, roles=config.roles)
        with chats.named():
            pooled, n_tokens = mean_pooled(batches, len(chats.ids))
        rng = np.random.default_rng(derive_seed(context.run_seed, self.name))
        clusters = fit_clusters(pooled[n_tokens > 0], config.clusters, rng=rng)
        clusters.save(out.artifact(CLUSTERS_FOLDER))
        model = engine.identity.model
        out.write_rows(
            [
                {
                    "id": row_id(self.name, []),
                    "width": config.clusters,
                    "d_model": pooled.shape[1],
                    "layer": config.layer,
                    "model": model,
                }
            ]
        )
        out.metrics = {"source": "clusters", "width": config.clusters, "d_model": pooled.shape[1]}
