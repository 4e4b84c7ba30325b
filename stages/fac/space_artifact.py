"""The artifacts that FAC stages hand one another: the feature space, and what "missing" was taken to mean."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from headwater.core.store import OutputWriter, StageOutput

if TYPE_CHECKING:
    from headwater.llm.hidden import HiddenBatch
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.clusters import Clusters
    from headwater.sae.extract import RowFeatures
    from headwater.sae.space import FeatureSpace

SPACE_FOLDER = "space"
CLUSTERS_FOLDER = "clusters"
_MISSING_FILE = "missing.json"

Mode = Literal["topk", "raw"]


class Space(Protocol):
    """A feature space as the stages use it."""

    @property
    def width(self) -> int: ...

    def check_fits(self, engine: TransformersEngine, layer: int) -> None:
        """Raises ConfigError unless the space was made for this model and layer."""
        ...

    def extract(self, batches: Iterable[HiddenBatch], rows: int, mode: Mode) -> Iterable[RowFeatures]:
        """What each of `rows` rows fires, in any order. A row without own tokens is there with n_tokens 0."""
        ...


def open_space(output: StageOutput) -> Space:
    """The feature space that an `sae` or a `clusters` stage left."""
    if output.artifact(CLUSTERS_FOLDER).is_dir():
        from headwater.sae.clusters import load_clusters

        return _ClusterSpace(load_clusters(output.artifact(CLUSTERS_FOLDER)))
    from headwater.sae.load import load_space

    return _SaeSpace(load_space(output.artifact(SPACE_FOLDER)))


@dataclass(frozen=True)
class _SaeSpace:
    space: FeatureSpace

    @property
    def width(self) -> int:
        return self.space.width

    def check_fits(self, engine: TransformersEngine, layer: int) -> None:
        check_fits(self.space, engine, layer)

    def extract(self, batches: Iterable[HiddenBatch], rows: int, mode: Mode) -> Iterable[RowFeatures]:
        from headwater.sae.extract import extract_features

        return extract_features(batches, self.space, mode=mode)


def check_fits(space: FeatureSpace, engine: TransformersEngine, layer: int) -> None:
    """Raises ConfigError unless an SAE reads what block `layer` of the engine's model puts out."""
    space.check_fits(model=engine.identity.model, layer=layer, d_model=engine.model.config.hidden_size)


@dataclass(frozen=True)
class _ClusterSpace:
    clusters: Clusters

    @property
    def width(self) -> int:
        return len(self.clusters.centroids)

    def check_fits(self, engine: TransformersEngine, layer: int) -> None:
        """Clusters are made in the same run from the same model and layer."""

    def extract(self, batches: Iterable[HiddenBatch], rows: int, mode: Mode) -> Iterable[RowFeatures]:
        from headwater.sae.clusters import mean_pooled
        from headwater.sae.extract import RowFeatures

        table = self.clusters.assign(*mean_pooled(batches, rows))
        for row in range(table.n_rows):
            own = slice(table.indptr[row], table.indptr[row + 1])
            yield RowFeatures(
                row, int(table.n_tokens[row]), table.features[own], table.values[own], table.positions[own]
            )


@dataclass(frozen=True)
class MissingFacts:
    """What "a row fires a feature" and "missing" mean in a run; later stages must mean the same."""

    delta: float
    """δ: a row fires a feature when g_i(x) > δ, in the unit of the SAE's input scale."""
    delta_quantile: float | None
    """The quantile of the anchor's positive activations that δ is, or None when it was given as a number."""
    min_support: int
    test: Literal["rate", "set_difference"]
    alpha: float
    control_false_discoveries: bool
    width: int


def write_missing_facts(out: OutputWriter, facts: MissingFacts) -> None:
    out.artifact(_MISSING_FILE).write_text(json.dumps(facts.__dict__, sort_keys=True, indent=1), "utf-8")


def missing_facts(output: StageOutput) -> MissingFacts:
    path: Path = output.artifact(_MISSING_FILE)
    return MissingFacts(**json.loads(path.read_text("utf-8")))
