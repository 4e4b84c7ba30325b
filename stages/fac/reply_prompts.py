"""Ask for the assistant's side: every selected text becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pyarrow as pa

from headwater.core.rows import MESSAGES, row_id, schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.base import StageConfig, StageContext, TableStage


class ReplyPromptsConfig(StageConfig):
    system: str = ""
    """System message for the replies; none when empty. It is not part of the dataset's messages."""


class ReplyPrompts(TableStage[ReplyPromptsConfig]):
    name: ClassVar[str] = "reply-prompts"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("id", "text")}

    @property
    def output(self) -> pa.Schema:
        return schema(selected=pa.string(), prompt=MESSAGES)

    @property
    def may_be_empty(self) -> bool:
        return True

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        for frame in inputs["rows"].frames():
            out.write_rows(
                [
                    {
                        "id": row_id(self.name, [row["id"]]),
                        "selected": row["id"],
                        "prompt": [*system, {"role": "user", "content": row["text"]}],
                    }
                    for row in frame.iter_rows(named=True)
                ]
            )
