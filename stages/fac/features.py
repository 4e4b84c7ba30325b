"""Which features every row fires: the feature space applied to a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.rows import Reject, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.registry import EngineConfig
from headwater.stages.base import Forecast, StageConfig, StageContext, TableStage
from headwater.stages.fac.chats import Chats
from headwater.stages.fac.space_artifact import Space, open_space

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.extract import RowFeatures

_ROWS_AT_ONCE = 2_048
"""Rows whose lengths are bucketed together; bounds the memory, whatever the dataset's size."""
_LEAST, _MOST, _VALUE_BINS = 1e-4, 1e4, 3000
"""Bounds and number of the bins, even on a logarithmic scale, in which activations are counted."""
_TOKENS_PER_ROW = 40
"""For forecasts only."""


class FeaturesConfig(StageConfig):
    model: EngineConfig
    """The model whose activations are measured; float32 unless you accept what `dtype: bfloat16` changes."""
    layer: int = Field(ge=0)
    """Decoder block whose output is read, counted from 0."""
    mode: Literal["topk", "raw"] = "topk"
    """`topk` applies the SAE's own activation before pooling, `raw` pools the ReLU of all pre-activations."""
    max_tokens: int = Field(256, ge=1)
    """Own tokens of a row that are read; what comes after them isn't. The metrics count the rows that reach it."""
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)
    """Whose messages are a row's own text."""
    disagreement_rows: int = Field(200, ge=0)
    """With a dtype other than float32: rows on which the disagreement with float32 is measured and recorded."""


class Features(TableStage[FeaturesConfig]):
    """Per row the largest activation of every feature over its own tokens: (feature, value, token position)."""

    name: ClassVar[str] = "features"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("id", "messages"), "space": ()}

    @property
    def output(self) -> pa.Schema:
        return schema(
            row=pa.string(),
            n_tokens=pa.int32(),
            features=pa.list_(pa.int32()),
            values=pa.list_(pa.float32()),
            positions=pa.list_(pa.int32()),
        )

    @property
    def may_be_empty(self) -> bool:
        return True

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"model": self.config.model}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        return Forecast(rows=rows["rows"], tokens_in=rows["rows"] * _TOKENS_PER_ROW)

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        rows = inputs["rows"]
        engine = local_engine(context, self.config.model)
        space = open_space(inputs["space"])
        space.check_fits(engine, self.config.layer)
        tokens = entries = full = 0
        values = np.zeros(_VALUE_BINS, dtype=np.int64)
        done = 0
        for frame in rows.frames(_ROWS_AT_ONCE):
            found = self._extract(engine, space, frame)
            ids = frame["id"].to_list()
            absent = [ids[index] for index in range(len(ids)) if index not in found]
            out.reject([Reject(key, "no_own_tokens", "nothing is left of the row's text as tokens") for key in absent])
            made = _frame([ids[index] for index in sorted(found)], [found[index] for index in sorted(found)])
            out.write(made)
            tokens += sum(row.n_tokens for row in found.values())
            entries += sum(len(row.features) for row in found.values())
            full += sum(row.n_tokens >= self.config.max_tokens for row in found.values())
            values += _binned([row.values for row in found.values()])
            done += frame.height
            context.progress(done, rows.rows, tokens_in=tokens)
        out.metrics = {
            "rows": out.rows,
            "tokens": tokens,
            "rows_at_max_tokens": full,
            "active_pairs": entries,
            "features_per_row": entries / max(out.rows, 1),
            "mode": self.config.mode,
            "dtype": self.config.model.dtype,
            "value_quantiles": _quantiles(values),
        } | self._bf16(space, rows, context)

    def _extract(self, engine: TransformersEngine, space: Space, frame: pl.DataFrame) -> dict[int, RowFeatures]:
        chats = Chats.of(frame)
        batches = engine.hidden_states(
            chats.messages, self.config.layer, max_tokens=self.config.max_tokens, roles=self.config.roles
        )
        with chats.named():
            return {row.row: row for row in space.extract(batches, len(chats.ids), self.config.mode) if row.n_tokens}

    def _bf16(self, space: Space, rows: StageOutput, context: StageContext) -> dict[str, Any]:
        if self.config.model.dtype in ("", "float32") or not self.config.disagreement_rows:
            return {}
        from dataclasses import asdict

        from headwater.sae.extract import bf16_disagreement

        frame = rows.scan().head(self.config.disagreement_rows).collect()
        exact = local_engine(context, self.config.model.model_copy(update={"dtype": "float32"}))
        reference = self._extract(exact, space, frame)
        other = self._extract(local_engine(context, self.config.model), space, frame)
        return {"disagreement_with_float32": asdict(bf16_disagreement(reference.values(), other.values()))}


def local_engine(context: StageContext, config: EngineConfig) -> TransformersEngine:
    """The engine as one that shows its activations. Raises ConfigError for engines that can't."""
    from headwater.core.errors import ConfigError
    from headwater.llm.transformers import TransformersEngine

    engine = context.engines.get(config)
    if not isinstance(engine, TransformersEngine):
        raise ConfigError(
            f"The engine {config.engine!r} does not show its activations.",
            todo="Use `transformers` or `embedded:smollm2-135m` as `model`; any engine may generate.",
        )
    return engine


def _frame(ids: list[str], rows: list[RowFeatures]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "id": [row_id(Features.name, [key]) for key in ids],
            "row": ids,
            "n_tokens": pl.Series([row.n_tokens for row in rows], dtype=pl.Int32),
            "features": pl.Series([row.features for row in rows], dtype=pl.List(pl.Int32)),
            "values": pl.Series([row.values for row in rows], dtype=pl.List(pl.Float32)),
            "positions": pl.Series([row.positions for row in rows], dtype=pl.List(pl.Int32)),
        },
        schema_overrides={"id": pl.String, "row": pl.String},
    )


def _binned(rows: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Values in each of the bins that `_quantiles` reads: all values of a dataset would fill the memory."""
    values = np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32)
    share = np.log(np.maximum(values, _LEAST) / _LEAST) / np.log(_MOST / _LEAST)
    return np.bincount(np.clip(share * _VALUE_BINS, 0, _VALUE_BINS - 1).astype(np.int64), minlength=_VALUE_BINS)


def _quantiles(counts: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """Of the activations, to within half a bin (0.3 %)."""
    if not counts.any():
        return {}
    up_to = np.cumsum(counts)
    found = {q: int(np.searchsorted(up_to, q * up_to[-1])) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
    return {
        str(q): round(float(_LEAST * (_MOST / _LEAST) ** ((place + 0.5) / _VALUE_BINS)), 4)
        for q, place in found.items()
    }
