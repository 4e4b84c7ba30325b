"""Ask a judge what each missing feature means, whether that holds, and whether the task needs it.

A feature that the judge cannot explain, or whose explanation it does not confirm, or that the task does not need, is
rejected with that reason. Detection and fuzzing say how well the explanation predicts where the feature fires.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field

from headwater.core.errors import BadOutput, ConfigError
from headwater.core.rows import Reject, Row
from headwater.core.seeds import derive_seed
from headwater.core.store import StageOutput
from headwater.llm.registry import EngineConfig
from headwater.llm.types import ChatRequest, Completion, Sampling
from headwater.stages.asking import ask
from headwater.stages.base import Call, Forecast, Knob, RowStage, StageConfig, StageContext
from headwater.stages.fac.missing import MISSING_SCHEMA, load_activations
from headwater.stages.fac.own_tokens import OwnTokens
from headwater.stages.fac.space_artifact import missing_facts, open_space

if TYPE_CHECKING:
    from headwater.sae.interpret import DetectionScore, Question
    from headwater.sae.spans import Span

_Parsed = TypeVar("_Parsed")

INTERPRETED_SCHEMA = pa.schema([*MISSING_SCHEMA, pa.field("unanswered", pa.int32())])
"""`unanswered` counts the texts of detection and fuzzing that got no readable answer; they count neither way."""

VERDICTS = ("cannot_tell", "not_verified", "irrelevant")
"""Reasons by which a judge turns a feature down."""
OVER_LIMIT = "over_limit"
"""The reason of a feature that no judge was asked about."""

_TOKENS_IN, _TOKENS_OUT = 500, 120
"""Per call, for the forecast."""


class InterpretSettings(StageConfig):
    """What a recipe may say about the judge's work."""

    limit: int = Field(200, ge=1)
    """Features put to the judge, those of a control and then the missing ones first, by p-value; the others count as
    turned down (`over_limit`)."""

    top_spans: int = Field(8, ge=2)
    """Strongest spans per feature; half of them explain, half of them score."""
    quantile_spans: int = Field(8, ge=0)
    """Weaker spans per feature, at even steps of activation: explanations from the top alone are too narrow."""
    max_unreadable_share: float = Knob(0.5, ge=0, le=1)
    """Share of the features asked about to lose, with a judge whose replies can't be read, before the stage fails."""
    score: bool = True
    """Whether detection and fuzzing are measured: about six more calls per feature."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    attempts: int = Field(2, ge=1)
    """How often a question is asked while its reply can't be read: each time with another seed, and after a reply that
    was cut with twice the room."""


class InterpretConfig(StageConfig):
    engine: EngineConfig
    task: str = ""
    """What relevance is judged against; empty: relevance is not judged."""
    settings: InterpretSettings = Field(default_factory=InterpretSettings)
    model: EngineConfig
    """The measured model, whose tokens cut the spans."""
    max_tokens: int = Field(256, ge=1)
    roles: tuple[Literal["system", "user", "assistant"], ...] = ("user",)


class Interpret(RowStage[InterpretConfig]):
    name: ClassVar[str] = "interpret"
    version: ClassVar[int] = 2
    inputs: ClassVar[Mapping[str, Sequence[str]]] = {
        "rows": ("id", "feature", "status", "p_value", "anchor_support", "spans"),
        "anchor": ("id", "text", "messages"),
        "anchor_features": ("row", "n_tokens", "features", "values", "positions"),
        "space": (),
    }

    @property
    def output(self) -> pa.Schema:
        return INTERPRETED_SCHEMA

    @property
    def max_reject_share(self) -> float:
        return self.config.settings.max_unreadable_share

    @property
    def verdicts(self) -> Collection[str]:
        return VERDICTS

    @property
    def untried(self) -> Collection[str]:
        return (OVER_LIMIT,)

    @property
    def may_be_empty(self) -> bool:
        return True

    def engine_configs(self) -> Mapping[str, EngineConfig]:
        return {"engine": self.config.engine, "model": self.config.model}

    @property
    def asks(self) -> Collection[str]:
        return ("engine",)

    def forecast(self, rows: Mapping[str, int]) -> Forecast:
        """As if every feature had all its spans and passed every question: the real bill is no larger."""
        calls = min(rows["rows"], self.config.settings.limit) * self._calls_per_feature()
        tokens = {"tokens_in": calls * _TOKENS_IN, "tokens_out": calls * _TOKENS_OUT}
        model = self.config.engine.model or self.config.engine.engine
        return Forecast(rows=rows["rows"], calls=calls, **tokens, model=model)

    def _calls_per_feature(self) -> int:
        from headwater.sae.interpret import TEXTS_PER_QUESTION

        settings = self.config.settings
        texts = (settings.top_spans + settings.quantile_spans) // 2
        detection, fuzzing = -(-2 * texts // TEXTS_PER_QUESTION), -(-texts // TEXTS_PER_QUESTION)
        return 2 + bool(self.config.task) + (detection + fuzzing if settings.score else 0)

    async def open(self, inputs: Mapping[str, StageOutput], context: StageContext) -> None:
        from headwater.sae.spans import collect_spans

        settings = self.config.settings
        self._run_seed = context.run_seed
        self._delta = missing_facts(inputs["rows"]).delta
        self._anchor = load_activations(inputs["anchor_features"], open_space(inputs["space"]).width)
        self._tokens = OwnTokens(inputs["anchor"], inputs["anchor_features"], self.config, context)
        features = inputs["rows"].read()
        self._check_limit(features)
        self._asked = frozenset(_first(features, settings.limit))
        self._spans = collect_spans(
            self._anchor,
            sorted(self._asked),
            self._tokens.of,
            delta=self._delta,
            n_top=settings.top_spans,
            n_quantile=settings.quantile_spans,
        )
        self._sampling = Sampling(temperature=settings.temperature, top_p=1, max_tokens=settings.max_tokens)

    def _check_limit(self, features: pl.DataFrame) -> None:
        """A part of the anchor's features, missing ones first, would make a FAC that means nothing."""
        limit = self.config.settings.limit
        if features.height > limit and (features["status"] == "present").any():
            raise ConfigError(
                f"Key 'judge.settings.limit' is {limit:,}, but with `judge.scope: anchor` all {features.height:,} "
                "features that the anchor fires are to be judged: FAC over a part of them would mean nothing.",
                todo=f"Raise it to {features.height} (some {features.height * self._calls_per_feature():,} calls), or "
                "take `judge.scope: missing`.",
            )

    async def process(self, row: Row, call: Call) -> Sequence[dict[str, Any]] | Reject:
        made = {name: value for name, value in row.items() if name != "id"} | {"unanswered": None}
        if row["feature"] not in self._asked:
            return Reject(row["id"], OVER_LIMIT, f"feature {row['feature']}: beyond `judge.settings.limit`")
        try:
            judged = await self._judge(row, call)
        except BadOutput as error:
            return Reject(row["id"], error.reason, f"feature {row['feature']}: {error.what}", error.raw)
        return judged if isinstance(judged, Reject) else [made | judged]

    async def _judge(self, row: Row, call: Call) -> dict[str, Any] | Reject:
        from headwater.sae import interpret
        from headwater.sae.interpret_replies import parse_explanation, parse_label

        feature = row["feature"]
        explain, score = interpret.split_spans(self._spans[feature])
        how: dict[str, Any] = {"run_seed": self._run_seed, "sampling": self._sampling}
        explanation, reply = await self._ask(
            call, interpret.explain_request(feature, explain, **how), parse_explanation
        )
        if explanation is None:
            return Reject(
                row["id"],
                "cannot_tell",
                f"feature {feature}: its spans share nothing that the judge can name",
                reply,
            )
        question = interpret.verify_request(feature, explanation, explain, **how)
        verified, reply = await self._ask(call, question, parse_label)
        if not verified.holds:
            return Reject(row["id"], "not_verified", f"feature {feature}: {explanation}", reply)
        relevance = None
        if self.config.task:
            question = interpret.relevance_request(feature, explanation, explain, self.config.task, **how)
            relevance, reply = await self._ask(call, question, parse_label)
            if not relevance.holds:
                return Reject(row["id"], "irrelevant", f"feature {feature}: {explanation}", reply)
        return {
            "explanation": explanation,
            "verified": verified.value,
            "relevance": relevance.value if relevance else None,
            **(await self._scores(feature, explanation, score, call, how) if self.config.settings.score else {}),
        }

    async def _scores(
        self, feature: int, explanation: str, active: list[Span], call: Call, how: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Balanced accuracy of detection and of fuzzing, on spans that the explanation was not made from."""
        from headwater.sae import interpret
        from headwater.sae.spans import contrast

        rng = np.random.default_rng(derive_seed(self._run_seed, self.name, feature))
        active, silent = contrast(self._anchor, feature, active, self._tokens.of, rng=rng)
        askers: dict[str, Callable[[], list[Question]]] = {
            "detection": lambda: interpret.detection_questions(feature, explanation, active, silent, **how),
            "fuzzing": lambda: interpret.fuzzing_questions(feature, explanation, active, **how),
        }
        made: dict[str, Any] = {"unanswered": 0}
        for name, questions_of in askers.items():
            try:
                questions = questions_of()
            except ConfigError:
                made[name] = None  # too few spans to score with
                continue
            score = await self._answered(questions, call)
            made["unanswered"] += score.unanswered
            made[name] = score.balanced_accuracy if score.unanswered <= score.answered else None
        return made

    async def _answered(self, questions: Sequence[Question], call: Call) -> DetectionScore:
        from headwater.sae.interpret import score_answers
        from headwater.sae.interpret_replies import parse_active

        answers = {}
        for question in questions:
            parse = partial(parse_active, n_texts=len(question.truth))
            try:
                answers[question.request.id], _ = await self._ask(call, question.request, parse)
            except BadOutput:
                continue  # counts as unanswered
        return score_answers(questions, answers)

    async def _ask(self, call: Call, request: ChatRequest, parse: Callable[[str], _Parsed]) -> tuple[_Parsed, str]:
        """What the judge answered, and its reply."""

        def read(_: ChatRequest, reply: Completion) -> tuple[_Parsed, str]:
            return parse(reply.text), reply.text

        return await ask(call, request, read, attempts=self.config.settings.attempts)


def _first(features: pl.DataFrame, limit: int) -> list[int]:
    """The features to ask about when there are more than `limit`: the surest missing ones, after those of a control."""
    ranked = features.sort(pl.col("status") != "random", "p_value", -pl.col("anchor_support").cast(pl.Int64), "feature")
    return ranked["feature"].head(limit).to_list()
