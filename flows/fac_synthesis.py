"""FAC Synthesis: find the features that a seed fires too rarely or never against an anchor; synthesise rows that do.

After Li et al., "Less is Enough: Synthesizing Diverse Data in LLM Feature Space with Sparse Autoencoders"
(arXiv 2602.10388, ICML 2026). What differs from the paper, and why, stands beside the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from headwater.core.settings import Settings
from headwater.flows.graph import Graph, Node
from headwater.flows.hub_names import HubLanguage, HubLicence
from headwater.flows.recipe import Recipe
from headwater.llm.registry import EngineConfig
from headwater.llm.types import Sampling
from headwater.sae.config import SaeTrainConfig
from headwater.stages.curate.load import Load, LoadConfig
from headwater.stages.emit.dataset import Dataset, DatasetConfig
from headwater.stages.fac.clusters import Clusters, ClustersConfig
from headwater.stages.fac.coverage import CoverageConfig, CoverageSettings, CoverageStage
from headwater.stages.fac.features import Features, FeaturesConfig
from headwater.stages.fac.first_prompts import FirstPrompts, FirstPromptsConfig
from headwater.stages.fac.interpret import Interpret, InterpretConfig, InterpretSettings
from headwater.stages.fac.missing import Missing, MissingConfig
from headwater.stages.fac.pairs import Pairs, PairsConfig
from headwater.stages.fac.prompts import Style
from headwater.stages.fac.reply_prompts import ReplyPrompts, ReplyPromptsConfig
from headwater.stages.fac.sae import LoadSae, LoadSaeConfig, LoadSaeSettings, TrainSae, TrainSaeConfig
from headwater.stages.fac.select import Select, SelectConfig
from headwater.stages.fac.targets import Targets, TargetsConfig
from headwater.stages.generate import Generate, GenerateConfig

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.data_cards.card import DatasetCard
    from headwater.data_cards.report import Report
    from headwater.flows.runs import Run


class MeasureSection(Settings):
    """What activations are read, and from which of a row's tokens."""

    model: EngineConfig = Field(default_factory=EngineConfig)
    layer: int = Field(15, ge=0)
    """Decoder block whose output is read, counted from 0. The paper takes the middle of the model."""
    mode: Literal["topk", "raw"] = "topk"
    max_tokens: int = Field(256, ge=1)
    roles: tuple[Literal["system", "user"], ...] = Field(("user",), min_length=1)
    """Whose messages of anchor and seed are read. New rows are user turns, which nothing of an assistant's could be
    compared with."""


class SaeSection(Settings):
    """Train an SAE on the anchor, the seed and `corpus`; or load one."""

    load: LoadSaeSettings | None = None
    train: SaeTrainConfig = Field(default_factory=SaeTrainConfig)
    corpus: LoadConfig | None = None
    """More texts to train on: a few thousand rows train a thin SAE."""

    @model_validator(mode="after")
    def _corpus_is_for_training(self) -> SaeSection:
        if self.load is not None and self.corpus is not None:
            raise ValueError("`corpus` is read only when an SAE is trained; drop `corpus` or `load`")
        return self


class MissingSection(Settings):
    delta: float | None = Field(None, ge=0)
    delta_quantile: float = Field(0.8, ge=0, lt=1)
    test: Literal["rate", "set_difference"] = "rate"
    alpha: float = Field(0.05, gt=0, lt=0.5)
    control_false_discoveries: bool = False
    min_support: int = Field(2, ge=1)
    limit: int = Field(60, ge=1)
    """Missing features to write rows for. The others are measured all the same, and a row that fires one serves it."""


class JudgeSection(Settings):
    """Interpretation by an LLM judge; none when `engine` is not given, and every live feature counts as relevant."""

    engine: EngineConfig | None = None
    task: str = ""
    """What the dataset is for, in a sentence or two: what relevance is judged against."""
    scope: Literal["missing", "anchor"] = "missing"
    """Which features the judge looks at. `anchor`: all that the anchor fires, so that FAC counts relevant ones alone,
    as the paper's does; raise `settings.limit` with it, and expect ten times the calls."""
    settings: InterpretSettings = Field(default_factory=InterpretSettings)


_ROOM: Mapping[Style, Sampling] = {"list": Sampling(max_tokens=48, stop=("\n",)), "instruct": Sampling(max_tokens=400)}


class SynthesisSection(Settings):
    method: Literal["two_step", "one_step", "anchor_row", "random_features", "dense_clusters"] = "two_step"
    """`two_step` is the method. Controls: `one_step` spends both steps' budget on step one; `anchor_row` repeats the
    anchor's strongest row in place of the pair; `random_features` aims at live features that aren't missing;
    `dense_clusters` takes k-means clusters of hidden states for features."""
    clusters: int = Field(24, ge=2)
    """How many, for `dense_clusters`. A row fires the one it is in, so with many of them few rows speak for each."""
    pair: Literal["pooled", "own"] = "pooled"
    """Whose candidates the strong example may come from: every feature's, or the feature's own. On the
    embedded model `pooled` hits more features; no other choice among methods was ahead of noise."""
    contrast: bool = True
    """Whether the weak example is shown in step two. On the embedded model it made no difference beyond noise."""
    style: Style = "list"
    """`list` prefills a numbered list (small models), `instruct` asks in words."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    sampling: Sampling = Field(default_factory=lambda given: _ROOM[given["style"]])
    """Unless given: for `list` 48 tokens up to the end of the line, for `instruct` 400."""
    candidates: int = Field(4, ge=1)
    generations: int = Field(4, ge=1)
    examples: int = Field(5, ge=1)
    max_reject_share: float = Field(0.5, ge=0, le=1)


class ReplySection(Settings):
    """The assistant's side of every row; with `engine: null` rows hold the user's turn only."""

    engine: EngineConfig | None = Field(default_factory=EngineConfig)
    system: str = ""
    sampling: Sampling = Field(default_factory=lambda: Sampling(max_tokens=200))
    attempts: int = Field(2, ge=1)
    """A row that gets no usable reply is lost, so it is worth asking twice; after a cut reply with twice the room."""
    max_reject_share: float = Field(0.5, ge=0, le=1)


class DatasetSection(Settings):
    name: str = "fac-synthesis"
    license: HubLicence = "other"
    """Licence of the rows, as the Hub calls it; depends on the anchor, the seed and the generator."""
    license_name: str = ""
    """With `license: other`: what the licence is called."""
    license_link: str = ""
    """With `license: other`: `LICENSE` or `LICENSE.md` for a file beside the card, or a URL."""
    language: tuple[HubLanguage, ...] = ("en",)
    description: str = ""

    @model_validator(mode="after")
    def _own_licence(self) -> DatasetSection:
        if self.license != "other" and (self.license_name or self.license_link):
            raise ValueError("`license_name` and `license_link` go with `license: other` alone")
        if self.license_link not in ("", "LICENSE", "LICENSE.md") and not self.license_link.startswith("https://"):
            raise ValueError("`license_link` is `LICENSE`, `LICENSE.md` or a URL that starts with https://")
        return self


class FacSynthesis(Recipe):
    flow: ClassVar[str] = "fac-synthesis"

    anchor: LoadConfig
    """What the task should cover."""
    seed_data: LoadConfig
    """What you have."""
    measure: MeasureSection = Field(default_factory=MeasureSection)
    sae: SaeSection = Field(default_factory=SaeSection)
    missing: MissingSection = Field(default_factory=MissingSection)
    judge: JudgeSection = Field(default_factory=JudgeSection)
    synthesis: SynthesisSection = Field(default_factory=SynthesisSection)
    select: SelectConfig = Field(default_factory=SelectConfig)
    reply: ReplySection = Field(default_factory=ReplySection)
    coverage: CoverageSettings = Field(default_factory=CoverageSettings)
    dataset: DatasetSection = Field(default_factory=DatasetSection)

    @property
    def meanings(self) -> str:
        """The node that says which features are missing and, with a judge, relevant."""
        return "interpret" if self.judge.engine is not None else "missing"

    def graph(self) -> Graph:
        nodes = [
            Node("anchor", Load(self.anchor), keys=("anchor",)),
            Node("seed", Load(self.seed_data), keys=("seed_data",)),
            *self._space(),
            self._features("anchor", "anchor"),
            self._features("seed", "seed"),
            *self._missing(),
            *self._synthesis(),
        ]
        return Graph(tuple(nodes), dataset="dataset")

    def card(self, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
        from headwater.flows.fac_card import build_card

        return build_card(self, run, outputs)

    def report(self, run: Run, outputs: Mapping[str, StageOutput]) -> Report:
        from headwater.flows.fac_report import build_report

        return build_report(self, run, outputs)

    def _space(self) -> list[Node]:
        measure, inputs = self.measure, {"anchor": "anchor", "seed": "seed"}
        if self.synthesis.method == "dense_clusters":
            config = ClustersConfig(
                model=measure.model,
                layer=measure.layer,
                max_tokens=measure.max_tokens,
                roles=measure.roles,
                clusters=self.synthesis.clusters,
            )
            return [Node("space", Clusters(config), {"anchor": "anchor"}, ("measure", "synthesis.clusters"))]
        if self.sae.load is not None:
            load = LoadSaeConfig(
                **self.sae.load.model_dump(),
                model=measure.model,
                measured_layer=measure.layer,
                max_tokens=measure.max_tokens,
                roles=measure.roles,
            )
            return [Node("space", LoadSae(load), {"anchor": "anchor"}, ("measure", "sae.load"))]
        corpus = []
        if self.sae.corpus is not None:
            corpus, inputs = (
                [Node("corpus", Load(self.sae.corpus), keys=("sae.corpus",))],
                {**inputs, "corpus": "corpus"},
            )
        train = TrainSaeConfig(
            model=measure.model,
            layer=measure.layer,
            max_tokens=measure.max_tokens,
            roles=measure.roles,
            train=self.sae.train,
        )
        return [*corpus, Node("space", TrainSae(train), inputs, ("measure", "sae.train"))]

    def _features(self, name: str, rows: str) -> Node:
        measure = self.measure
        own = measure.roles if rows in ("anchor", "seed") else ("user",)
        config = FeaturesConfig(
            model=measure.model, layer=measure.layer, mode=measure.mode, max_tokens=measure.max_tokens, roles=own
        )
        return Node(f"features.{name}", Features(config), {"rows": rows, "space": "space"}, ("measure",))

    def _missing(self) -> list[Node]:
        measure = self.measure
        cut = {"model": measure.model, "max_tokens": measure.max_tokens, "roles": measure.roles}
        settings = self.missing.model_dump(exclude={"limit"})
        random = self.synthesis.method == "random_features"
        judged = self.judge.engine is not None
        if self.synthesis.method == "dense_clusters":
            settings["delta"] = 0.0  # a row fires its cluster and no other, however near it lies
        config = MissingConfig(
            **settings,
            **cut,
            random_features=self.missing.limit if random else 0,
            every_live=judged and self.judge.scope == "anchor",
            expected=max(self.judge.settings.limit, self.missing.limit),
            allow_empty=self.allow_empty,
        )
        table = {"anchor": "anchor", "anchor_features": "features.anchor", "space": "space"}
        nodes = [Node("missing", Missing(config), {**table, "seed_features": "features.seed"}, ("missing",))]
        if self.judge.engine is not None:
            judge = InterpretConfig(
                engine=self.judge.engine,
                task=self.judge.task,
                settings=self.judge.settings,
                **cut,
            )
            nodes.append(Node("interpret", Interpret(judge), {**table, "rows": "missing"}, ("judge",)))
        targets = TargetsConfig(limit=self.missing.limit, random_features=random, allow_empty=self.allow_empty)
        tables = {"facts": "missing", "missing": self.meanings, "anchor_features": "features.anchor"}
        return [*nodes, Node("targets", Targets(targets), tables, ("missing",))]

    def _synthesis(self) -> list[Node]:
        synthesis = self.synthesis
        targets = {"targets": "targets", "facts": "missing"}
        one_step = synthesis.method == "one_step"
        budget = synthesis.candidates + (synthesis.generations if one_step else 0)
        first = FirstPromptsConfig(
            style=synthesis.style,
            candidates=budget,
            examples=synthesis.examples,
            expected_features=self.missing.limit,
        )
        generate = GenerateConfig(
            engine=synthesis.engine,
            sampling=synthesis.sampling,
            single_line=synthesis.style == "list",
            max_reject_share=synthesis.max_reject_share,
        )
        step_one = {"prompts.1": "prompts.1", "texts.1": "texts.1", "features.1": "features.1"}
        nodes = [
            Node("prompts.1", FirstPrompts(first), {"targets": "targets"}, ("synthesis",)),
            Node("texts.1", Generate(generate), {"rows": "prompts.1"}, ("synthesis",)),
            self._features("1", "texts.1"),
        ]
        made = dict(step_one)
        if not one_step:
            nodes += self._step_two(targets, generate)
            made |= {"prompts.2": "prompts.2", "texts.2": "texts.2", "features.2": "features.2"}
        tables = {**targets, **made, "anchor": "anchor", "seed": "seed"}
        nodes.append(Node("select", Select(self.select), tables, ("select",)))
        nodes += self._replies()
        measured = {name: node for name, node in made.items() if name.startswith("features.")}
        tables = {"space": "space", "anchor_features": "features.anchor", "seed_features": "features.seed"}
        tables |= {"missing": self.meanings, "dataset": "dataset"}
        coverage = CoverageConfig(
            **self.coverage.model_dump(), all_judged=self.meanings == "interpret" and self.judge.scope == "anchor"
        )
        nodes.append(Node("coverage", CoverageStage(coverage), {**targets, **tables, **measured}, ("coverage",)))
        return nodes

    def _step_two(self, targets: Mapping[str, str], generate: GenerateConfig) -> list[Node]:
        synthesis = self.synthesis
        pairs = PairsConfig(
            style=synthesis.style,
            generations=synthesis.generations,
            source="anchor_row" if synthesis.method == "anchor_row" else synthesis.pair,
            contrast=synthesis.contrast,
            examples=max(0, synthesis.examples - 1),
            expected_features=self.missing.limit,
        )
        scored = {"prompts": "prompts.1", "candidates": "texts.1", "features": "features.1"}
        return [
            Node("prompts.2", Pairs(pairs), {**targets, **scored}, ("synthesis",)),
            Node("texts.2", Generate(generate), {"rows": "prompts.2"}, ("synthesis",)),
            self._features("2", "texts.2"),
        ]

    def _replies(self) -> list[Node]:
        dataset = Dataset(DatasetConfig(allow_empty=self.allow_empty))
        if self.reply.engine is None:
            return [Node("dataset", dataset, {"rows": "select"})]
        generate = GenerateConfig(
            engine=self.reply.engine,
            sampling=self.reply.sampling,
            attempts=self.reply.attempts,
            max_reject_share=self.reply.max_reject_share,
        )
        return [
            Node("prompts.reply", ReplyPrompts(ReplyPromptsConfig(system=self.reply.system)), {"rows": "select"}),
            Node("replies", Generate(generate), {"rows": "prompts.reply"}, ("reply",)),
            Node("dataset", dataset, {"rows": "select", "replies": "replies", "reply_prompts": "prompts.reply"}),
        ]
