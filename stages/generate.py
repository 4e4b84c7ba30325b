"""Ask an engine: one request per row, one text per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from headwater.core.errors import BadOutput
from headwater.core.fingerprint import canonical_json, sha256_text
from headwater.core.rows import MESSAGES, Reject, Row, schema
from headwater.core.seeds import derive_seed
from headwater.core.store import StageOutput
from headwater.llm.registry import EngineConfig
from headwater.llm.types import ChatRequest, Completion, Message, Sampling
from headwater.stages.asking import ask
from headwater.stages.base import Call, Forecast, Knob, RowStage, StageConfig, StageContext


class GenerateConfig(StageConfig):
    engine: EngineConfig
    sampling: Sampling = Field(default_factory=Sampling)
    single_line: bool = False
    """Reject a reply whose text spans several lines (a list item that ran on)."""
    attempts: int = Field(1, ge=1)
    """How often a prompt is asked while its reply is of no use: each time with another seed, and after a reply that was
    cut with twice the room."""
    max_reject_share: float = Knob(0.5, ge=0, le=1)
    """Share of requests without a usable reply to live with."""


class Generate(RowStage[GenerateConfig]):
    """One completion for every prompt. Rows keep the id of their prompt in `request`."""

    name: ClassVar[str] = "generate"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {"rows": ("id", "prompt")}

    @property
    def output(self) -> pa.Schema:
        return schema(
            request=pa.string(),
            text=pa.string(),
            messages=MESSAGES,
            prompt_hash=pa.string(),
            seed=pa.int64(),
            engine=pa.string(),
            model=pa.string(),
            cleaned=pa.bool_(),
        )

    @property
    def max_reject_share(self) -> float:
        return self.config.max_reject_share

    @property
    def may_be_empty(self) -> bool:
        return True

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"engine": self.config.engine}

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        """As if every first reply could be used."""
        calls = rows["rows"]
        return Forecast(
            rows=calls,
            calls=calls,
            tokens_in=calls * 150,
            tokens_out=calls * self.config.sampling.max_tokens // 2,
            model=self.config.engine.model or self.config.engine.engine,
        )

    async def open(self, inputs: Mapping[str, StageOutput], context: StageContext) -> None:
        self._run_seed = context.run_seed
        self._identity = context.engines.get(self.config.engine).identity

    async def process(self, row: Row, call: Call) -> Sequence[dict[str, Any]] | Reject:
        prompt = tuple(Message(message["role"], message["content"]) for message in row["prompt"])
        seed = derive_seed(self._run_seed, self.name, row["id"])
        request = ChatRequest(row["id"], prompt, self.config.sampling, seed)
        return await ask(call, request, partial(self._rows, row), attempts=self.config.attempts)

    def _rows(self, row: Row, request: ChatRequest, completion: Completion) -> list[dict[str, Any]]:
        text = completion.text.strip()
        if not text:
            raise BadOutput("The reply holds white space only.", reason="empty_reply", raw=completion.text)
        if self.config.single_line and "\n" in text:
            raise BadOutput("The reply spans several lines.", reason="several_lines", raw=text)
        return [
            {
                "request": row["id"],
                "text": text,
                "messages": [{"role": "user", "content": text}],
                "prompt_hash": sha256_text(canonical_json([dict(message) for message in row["prompt"]]))[:16],
                "seed": request.seed,
                "engine": self._identity.engine,
                "model": self._identity.model,
                "cleaned": completion.cleaned,
            }
        ]
