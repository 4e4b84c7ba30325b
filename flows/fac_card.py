"""The data card of a FAC Synthesis dataset: the facts, out of the manifests and metrics of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwater.data_cards.card_types import (
    DatasetCard,
    Measure,
    ModelUse,
    RejectCount,
    Source,
    Split,
    StageUse,
    Table,
)
from headwater.flows.fac_report_facts import REASONS
from headwater.flows.fac_report_judge import relevance_note
from headwater.stages.emit.dataset import DATASET_SCHEMA

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis
    from headwater.flows.runs import Run
    from headwater.stages.curate.load import LoadConfig

_COLUMNS = {
    "id": "Hash of the row's origin: stage, parents, sample index.",
    "messages": "The chat: the synthesised user turn and, where replies were asked for, the assistant's.",
    "feature": "The missing feature that the row was kept for.",
    "activation": "How strongly the user turn fires that feature: the maximum over its tokens.",
    "explanation": "What a judge said the feature stands for; null without a judge.",
    "fires": "Those of the features aimed at that the row fires above δ.",
    "engine": "Engine that wrote the user turn.",
    "model": "Model that wrote the user turn.",
    "reply_model": "Model that wrote the assistant's turn; null when there is none.",
    "prompt_hash": "Hash of the prompt that the user turn answers.",
    "seed": "Seed of the user turn's sampling.",
    "source": "Id of the generated text in the run's stage outputs.",
    "parents": "Ids of what the row was made from: generated text, pair, anchor rows shown.",
}

STAGE_SENTENCES = {
    "load": "Reads the dataset; unusable rows are named.",
    "sae": "Provides the sparse autoencoder.",
    "clusters": "Clusters the anchor's hidden states (a control).",
    "features": "Extracts the features that every row fires.",
    "missing": "Finds the anchor's features that the seed lacks.",
    "interpret": "Asks a judge what each feature means and whether the task needs it.",
    "first-prompts": "Writes the prompts of step one.",
    "generate": "Asks the generator.",
    "pairs": "Forms the contrastive pairs and the prompts of step two.",
    "select": "Keeps what fires a missing feature; drops near-duplicates and copies.",
    "reply-prompts": "Writes the prompts for the assistant's turns.",
    "dataset": "Lays out the rows as chats.",
    "coverage": "Measures coverage before and after.",
}

LIMITS = (
    "A feature is a direction that one sparse autoencoder found in one model at one layer; another SAE, layer or model "
    "names other features, and δ has no meaning outside this one.",
    "Rising coverage shows that the missing features fire, not that a model trained on the rows gets better.",
    "The same SAE chose the rows and measured them: coverage after is what was optimised, so compare it with the nulls "
    "beside it.",
)


def build_card(recipe: FacSynthesis, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
    """Everything on the card is read from the outputs, so a reused run has the same card."""
    dataset = outputs["dataset"]
    coverage = outputs["coverage"].metrics
    return DatasetCard(
        title=recipe.dataset.name,
        summary=recipe.dataset.description or _summary(recipe, outputs),
        licence=recipe.dataset.license,
        languages=recipe.dataset.language,
        tags=("fac-synthesis", "sparse-autoencoder"),
        tables=(
            Table(
                arrow_schema=DATASET_SCHEMA,
                meanings=_COLUMNS,
                splits=(
                    Split(
                        name="train",
                        path="dataset/train-*.parquet",
                        rows=dataset.rows,
                        bytes=sum(path.stat().st_size for path in dataset.data_files),
                    ),
                ),
            ),
        ),
        pipeline=recipe.pipeline,
        how=_how(recipe),
        stages=tuple(_stage_use(node, output) for node, output in outputs.items()),
        measures=_measures(coverage),
        measures_note=relevance_note(recipe, outputs),
        rejects=tuple(
            RejectCount(stage=node, reason=reason, count=count, meaning=REASONS.get(reason, ""))
            for node, output in outputs.items()
            for reason, count in output.manifest["reasons"].items()
        ),
        models=_models(recipe, outputs),
        sources=(
            _source("anchor", recipe.anchor, outputs["anchor"]),
            _source("seed", recipe.seed_data, outputs["seed"]),
        ),
        recipe=run.recipe,
        command=f"pipeline run {recipe.pipeline} -c recipe.yaml",
        limits=limits(recipe),
        fingerprint=str(dataset.manifest["fingerprint"]["digest"]),
        lineage=(("run seed", str(recipe.seed)), *sorted(dataset.manifest["libraries"].items())),
    )


def limits(recipe: FacSynthesis) -> tuple[str, ...]:
    """What the numbers of this recipe do not show."""
    own: list[str] = []
    if recipe.synthesis.engine.engine.startswith("embedded"):
        own.append(
            "The generator has 135 million parameters. Its texts are often odd or wrong in content; the rows show that "
            "the pipeline works and what it measures, and are no good training data."
        )
    if recipe.synthesis.method != "two_step":
        own.append(f"Made with the control `{recipe.synthesis.method}`, not with the method itself.")
    return (*own, *LIMITS)


def _summary(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str:
    missing, coverage = outputs["missing"].metrics, outputs["coverage"].metrics
    return (
        f"{outputs['dataset'].rows:,} synthetic rows that fire features of a language model which the anchor dataset "
        f"fires and the seed dataset lacks: {missing['missing']:,} features were missing, and {coverage['chosen']:,} "
        "of them were aimed at."
    )


def _how(recipe: FacSynthesis) -> str:
    synthesis, measure = recipe.synthesis, recipe.measure
    return (
        f"FAC Synthesis (arXiv 2602.10388), method `{synthesis.method}`. Features are read after block {measure.layer} "
        f"of `{measure.model.model or measure.model.engine}`, pooled by their maximum over a row's own tokens. For "
        f"every chosen missing feature the generator wrote {synthesis.candidates} candidates in step one and "
        f"{synthesis.generations} texts in step two; texts that fire no missing feature, copy a source or repeat one "
        "another were dropped."
    )


def _stage_use(node: str, output: StageOutput) -> StageUse:
    manifest = output.manifest
    counts = manifest["counts"]
    stage = str(manifest["stage"])
    return StageUse(
        name=node,
        version=int(manifest["fingerprint"]["parts"]["version"]),
        does=STAGE_SENTENCES[stage],
        attempted=counts["attempted"],
        accepted=counts["accepted"],
        rejected=counts["rejected"],
        fingerprint=str(manifest["fingerprint"]["digest"]),
    )


def _measures(coverage: Mapping[str, Any]) -> tuple[Measure, ...]:
    before, after = coverage["before"], coverage["after"]
    random = coverage.get("random_features")
    against = f"{random['mean']:.0%} for equally many random live features" if random else ""
    return (
        Measure(
            name="FAC",
            before=before["binary"],
            after=after["binary"],
            unit="share",
            hint=f"features of the anchor that fire, of {before['n_anchor']:,}",
        ),
        Measure(
            name="FAC, by frequency",
            before=before["frequency"],
            after=after["frequency"],
            unit="share",
            hint="features weigh the share of anchor rows that fire them",
        ),
        Measure(
            name="FAC, by magnitude",
            before=before["magnitude"],
            after=after["magnitude"],
            unit="share",
            hint="features weigh their mean activation in the anchor",
        ),
        Measure(
            name="Missing features that the rows fire",
            before=None,
            after=coverage["missing_covered"],
            unit="share",
            hint=f"of {coverage['missing']:,} missing; {against}".rstrip("; "),
        ),
        Measure(
            name="Chosen missing features that the rows fire",
            before=None,
            after=coverage["chosen_covered"],
            unit="share",
            hint=f"of {coverage['chosen']:,} aimed at",
        ),
    )


def _models(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> tuple[ModelUse, ...]:
    roles = {
        "features.anchor": "gave the activations",
        "interpret": "judged the features",
        "texts.1": "wrote the user turns",
        "replies": "wrote the replies",
    }
    used = []
    for node, role in roles.items():
        if node not in outputs:
            continue
        identity = next(iter(outputs[node].manifest["models"].values()))
        licence = "apache-2.0" if identity["engine"].startswith("embedded") else "see the model's own card"
        used.append(
            ModelUse(
                role=role,
                name=identity["model"],
                revision=identity["revision"][:16] or "not reported",
                licence=licence,
                engine=identity["engine"],
            )
        )
    return tuple(used)


def _source(role: str, section: LoadConfig, output: StageOutput) -> Source:
    """The licence comes from the recipe: it changes no row, so a reused output would remember an old one."""
    return Source(
        role=role,
        name=str(output.metrics["source"]),
        rows=output.rows,
        licence=section.license,
        content_hash=output.content_hash[:16],
    )
