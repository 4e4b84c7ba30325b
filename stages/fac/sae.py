"""The feature space: an SAE trained on the run's own texts, or one that somebody trained, from a disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from headwater.core.fingerprint import canonical_json, sha256_file, sha256_text
from headwater.core.rows import row_id, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.registry import EngineConfig
from headwater.sae.config import SaeTrainConfig
from headwater.stages.base import Forecast, Knob, StageConfig, StageContext, TableStage
from headwater.stages.fac.chats import Chats
from headwater.stages.fac.features import local_engine
from headwater.stages.fac.space_artifact import SPACE_FOLDER, check_fits

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.space import FeatureSpace

_QUALITY_ROWS = 300
"""Anchor rows on which a loaded SAE is measured."""
_LOSS_ROWS = 24
"""Rows on which the recovered loss is measured: three forward passes each, through the whole model."""

SPACE_SCHEMA = schema(width=pa.int64(), d_model=pa.int64(), layer=pa.int64(), model=pa.string())
"""One row; the weights are an artifact."""


class TrainSaeConfig(StageConfig):
    model: EngineConfig
    layer: int = Field(ge=0)
    max_tokens: int = Field(256, ge=1)
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)
    train: SaeTrainConfig = Field(default_factory=SaeTrainConfig)


class TrainSae(TableStage[TrainSaeConfig]):
    """Trains on every input it is given: the anchor, the seed, and a corpus where there is one."""

    name: ClassVar[str] = "sae"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"anchor": ("id", "messages"), "seed": ("id", "messages")}

    @property
    def output(self) -> pa.Schema:
        return SPACE_SCHEMA

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"model": self.config.model}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=1)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        from headwater.sae.train import collect_activations, train_space

        config = self.config
        engine = local_engine(context, config.model)
        chats = Chats.of(*(output.read() for output in inputs.values()))
        context.note(f"reading activations of {len(chats.ids):,} texts at block {config.layer}")
        with tempfile.TemporaryDirectory(dir=out.artifact("").parent, prefix="activations-") as folder:
            with chats.named():
                tokens = collect_activations(
                    engine, chats.messages, config.layer, Path(folder), max_tokens=config.max_tokens, roles=config.roles
                )
            space, report = train_space(
                tokens,
                config.train,
                derive_seed(context.run_seed, self.name) % 2**32,
                progress=lambda step, total, loss: context.progress(step, total, loss=round(loss, 4)),
            )
        context.note("trained; measuring what the model's predictions lose by it")
        recovered = _loss_recovered(engine, chats, space, config)
        space.save(out.artifact(SPACE_FOLDER))
        out.write_rows([_row(space)])
        out.metrics = {
            "source": "trained",
            "width": space.width,
            "d_model": space.d_model,
            "config": config.train.model_dump(mode="json"),
            **asdict(report),
            "loss_recovered": recovered,
        }


class LoadSaeSettings(StageConfig):
    """What a recipe may say about an SAE on disk. What its files don't say must be given here."""

    source: str = Knob(...)
    """A sae-lens or sparsify folder, a `.pth` of the FAC authors, a Qwen-Scope `.pt`, or the name of a sae-lens release
    whose files are in the local cache. Its content is fingerprinted, not its path."""
    sae_id: str = ""
    layer: int | None = Field(None, ge=0)
    k: int | None = Field(None, ge=1)
    input_scale: float | None = Field(None, gt=0)
    made_for: str = ""
    """How the SAE's files call the model, where that is another name for the weights of the recipe's model. An SAE that
    was made for a model of another name is refused without it."""
    allow_pickle: bool = False
    """Permit `.pt` and `.pth` files, read with torch's restricted unpickler."""


class LoadSaeConfig(LoadSaeSettings):
    model: EngineConfig
    """The model that the SAE is to be used with."""
    measured_layer: int = Field(ge=0)
    """Block whose output is read: the SAE must be one of it."""
    max_tokens: int = Field(256, ge=1)
    """As in the features stage."""
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)
    """As in the features stage."""


class LoadSae(TableStage[LoadSaeConfig]):
    """Loads an SAE and keeps it as an artifact in the one format of the later stages."""

    name: ClassVar[str] = "sae"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"anchor": ("id", "messages")}

    @property
    def output(self) -> pa.Schema:
        return SPACE_SCHEMA

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"model": self.config.model}

    def external_inputs(self) -> Mapping[str, Any]:
        path = Path(self.config.source).expanduser()
        if path.is_dir():
            files = sorted(file for file in (path / self.config.sae_id).rglob("*") if file.is_file())
            return {"content": sha256_text(canonical_json([[f.name, sha256_file(f)] for f in files]))}
        return {"content": sha256_file(path) if path.is_file() else self.config.source}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=1)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        from headwater.sae.load import load_space

        config = self.config
        model = context.engines.get(config.model).identity.model
        space = load_space(
            config.source,
            sae_id=config.sae_id,
            fallback_model=model,
            layer=config.layer,
            k=config.k,
            input_scale=config.input_scale,
            allow_pickle=config.allow_pickle,
        )
        space = space.named_for(model, also_known_as=config.made_for)
        engine = local_engine(context, config.model)
        check_fits(space, engine, config.measured_layer)
        space.save(out.artifact(SPACE_FOLDER))
        out.write_rows([_row(space)])
        out.metrics = {
            "source": "loaded",
            "width": space.width,
            "d_model": space.d_model,
            "layer": space.layer,
            "facts": dict(space.facts),
            **self._quality(space, engine, Chats.of(inputs["anchor"].read()), out),
        }

    def _quality(
        self, space: FeatureSpace, engine: TransformersEngine, chats: Chats, out: OutputWriter
    ) -> dict[str, Any]:
        """What the SAE is worth on the texts at hand; it was trained on others."""
        from headwater.sae.activations import collect_activations
        from headwater.sae.metrics import measure_space

        config = self.config
        with tempfile.TemporaryDirectory(dir=out.artifact("").parent, prefix="activations-") as folder:
            sample = chats.sample(_QUALITY_ROWS)
            with sample.named():
                tokens = collect_activations(
                    engine, sample.messages, space.layer, Path(folder), max_tokens=config.max_tokens, roles=config.roles
                )
            quality = measure_space(space, np.array(tokens.tokens))
        return {**asdict(quality), "loss_recovered": _loss_recovered(engine, chats, space, config)}


def _loss_recovered(
    engine: TransformersEngine, chats: Chats, space: FeatureSpace, config: TrainSaeConfig | LoadSaeConfig
) -> dict[str, Any]:
    from headwater.sae.metrics import loss_recovered

    sample = chats.sample(_LOSS_ROWS)
    with sample.named():
        found = loss_recovered(engine, sample.messages, space, max_tokens=config.max_tokens, roles=config.roles)
    return asdict(found) | {"recovered": found.recovered}


def _row(space: FeatureSpace) -> dict[str, Any]:
    return {
        "id": row_id("sae", [], 0),
        "width": space.width,
        "d_model": space.d_model,
        "layer": space.layer,
        "model": space.model,
    }
