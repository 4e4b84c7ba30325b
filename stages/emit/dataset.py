"""The dataset: selected rows as chats, in the form that trainers eat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from headwater.core.rows import MESSAGES, Reject, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import StageConfig, StageContext, TableStage

DATASET_SCHEMA = schema(
    messages=MESSAGES,
    feature=pa.int32(),
    activation=pa.float32(),
    explanation=pa.string(),
    fires=pa.list_(pa.int32()),
    engine=pa.string(),
    model=pa.string(),
    reply_model=pa.string(),
    prompt_hash=pa.string(),
    seed=pa.int64(),
    cleaned=pa.bool_(),
    source=pa.string(),
    parents=pa.list_(pa.string()),
)


class DatasetConfig(StageConfig):
    allow_empty: bool = False


class Dataset(TableStage[DatasetConfig]):
    """With the inputs `replies` and `reply_prompts`, rows end with the assistant's turn; without, with the user's."""

    name: ClassVar[str] = "dataset"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "rows": ("id", "text", "feature", "activation", "explanation", "fires", "source", "cleaned", "parents")
    }

    @property
    def output(self) -> pa.Schema:
        return DATASET_SCHEMA

    @property
    def may_be_empty(self) -> bool:
        return self.config.allow_empty

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        replies = _replies(inputs) if "replies" in inputs else None
        for frame in inputs["rows"].frames():
            rows: list[dict[str, Any]] = []
            rejects: list[Reject] = []
            for row in frame.iter_rows(named=True):
                messages = [{"role": "user", "content": row["text"]}]
                reply = None
                if replies is not None:
                    reply = replies.get(row["id"])
                    if reply is None:
                        rejects.append(
                            Reject(row["id"], "no_usable_reply", "see the rejects of `replies`", row["text"])
                        )
                        continue
                    messages.append({"role": "assistant", "content": reply["text"]})
                rows.append(_row(row, messages, reply))
            out.write_rows(rows)
            out.reject(rejects)


def _replies(inputs: Mapping[str, StageOutput]) -> dict[str, dict[str, Any]]:
    prompts = inputs["reply_prompts"].read().select(request="id", selected="selected")
    joined = inputs["replies"].read().select("request", "text", "model", "cleaned").join(prompts, on="request")
    return {row["selected"]: row for row in joined.iter_rows(named=True)}


def _row(row: Mapping[str, Any], messages: list[dict[str, str]], reply: Mapping[str, Any] | None) -> dict[str, Any]:
    kept = ("feature", "activation", "explanation", "fires", "engine", "model", "prompt_hash", "seed", "source")
    return {
        "id": row_id(Dataset.name, [row["id"]]),
        "messages": messages,
        **{name: row[name] for name in kept},
        "cleaned": row["cleaned"] or bool(reply and reply["cleaned"]),
        "reply_model": reply["model"] if reply else None,
        "parents": [row["id"], *row["parents"]],
    }
