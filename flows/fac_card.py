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
from headwater.data_cards.places import public_name
from headwater.flows.fac_report_facts import REASONS, loaded_sae, share, why_no_null
from headwater.flows.fac_report_judge import relevance_note
from headwater.stages.emit.dataset import DATASET_SCHEMA

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis
    from headwater.flows.runs import Run
    from headwater.stages.base import Stage
    from headwater.stages.curate.load import LoadConfig

_COLUMNS = {
    "id": "Hash of the row's origin: stage, parents, sample index.",
    "messages": "The chat: the synthesised user turn and, where replies were asked for, the assistant's.",
    "feature": "The missing feature (in the control `random_features`: live feature) that the row was kept for.",
    "activation": "How strongly the user turn fires that feature: the maximum over its tokens.",
    "explanation": "What a judge said the feature stands for; null without a judge.",
    "fires": "All missing features that the row fires above δ (in the control `random_features`: those drawn).",
    "engine": "Engine that wrote the user turn.",
    "model": "Model that wrote the user turn.",
    "reply_model": "Model that wrote the assistant's turn; null when there is none.",
    "prompt_hash": "Hash of the prompt that the user turn answers.",
    "seed": "Seed of the user turn's sampling.",
    "cleaned": "Whether lone surrogates or NULs were taken out of what a model wrote.",
    "source": "Id of the generated text in the run's stage outputs.",
    "parents": "Ids of what the row was made from: generated text, pair, anchor rows shown.",
}

_STAGE_SENTENCES = {
    "load": "Reads the dataset; unusable rows are named.",
    "sae": "Provides the sparse autoencoder.",
    "clusters": "Clusters the anchor's hidden states (a control).",
    "features": "Extracts the features that every row fires.",
    "missing": "Finds the anchor's features that the seed never fires, or more rarely (`missing.test`).",
    "interpret": "Asks a judge what each feature means and whether the task needs it.",
    "targets": "Chooses which of them prompts are written for.",
    "first-prompts": "Writes the prompts of step one.",
    "generate": "Asks the generator.",
    "pairs": "Forms the contrastive pairs and the prompts of step two.",
    "select": "Keeps what fires a missing feature; drops near-duplicates and copies.",
    "reply-prompts": "Writes the prompts for the assistant's turns.",
    "dataset": "Lays out the rows as chats.",
    "coverage": "Measures coverage before and after.",
}

_SAE_LIMIT = (
    "A feature is a direction that one sparse autoencoder found in one model at one layer; another SAE, layer or model "
    "names other features, and δ has no meaning outside this one."
)
_CLUSTERS_LIMIT = (
    "A feature is a cluster of one model's hidden states at one layer; other clusters, another layer or model name "
    "other features, and δ has no meaning outside these."
)


def build_card(recipe: FacSynthesis, run: Run, outputs: Mapping[str, StageOutput]) -> DatasetCard:
    """Everything on the card is read from the outputs, so a reused run has the same card."""
    dataset = outputs["dataset"]
    coverage = outputs["coverage"].metrics
    graph = recipe.graph()
    return DatasetCard(
        title=recipe.dataset.name,
        summary=recipe.dataset.description or _summary(recipe, outputs),
        licence=recipe.dataset.license,
        licence_name=recipe.dataset.license_name,
        licence_link=recipe.dataset.license_link,
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
                        arrow_bytes=_arrow_bytes(dataset),
                    ),
                ),
            ),
        ),
        pipeline=recipe.pipeline,
        how=_how(recipe, outputs),
        stages=tuple(_stage_use(graph[node].stage, node, output) for node, output in outputs.items()),
        measures=_measures(recipe, coverage, by_rate=outputs["missing"].metrics["test"] == "rate"),
        measures_note=relevance_note(recipe, outputs),
        rejects=tuple(
            RejectCount(stage=node, reason=reason, count=count, meaning=REASONS.get(reason, ""))
            for node, output in outputs.items()
            for reason, count in output.manifest["reasons"].items()
        ),
        models=_models(recipe, outputs),
        sources=_sources(recipe, outputs),
        recipe=run.recipe,
        command=f"pipeline run {recipe.pipeline} -c recipe.yaml",
        limits=limits(recipe, made=dataset.rows > 0),
        fingerprint=str(dataset.manifest["fingerprint"]["digest"]),
        lineage=(("run seed", str(recipe.seed)), *sorted(dataset.manifest["libraries"].items())),
    )


def _arrow_bytes(output: StageOutput) -> int:
    import pyarrow.parquet as pq

    return sum(batch.nbytes for path in output.data_files for batch in pq.ParquetFile(path).iter_batches())


def limits(recipe: FacSynthesis, *, made: bool) -> tuple[str, ...]:
    """What the numbers of this recipe do not show; `made` says whether there are rows that they are about."""
    own: list[str] = []
    if made and recipe.synthesis.engine.engine.startswith("embedded"):
        own.append(
            "The generator has 135 million parameters. Its texts are often odd or wrong in content; the rows show that "
            "the pipeline works and what it measures, and are no good training data."
        )
    if recipe.synthesis.method != "two_step":
        own.append(f"Made with the control `{recipe.synthesis.method}`, not with the method itself.")
    clusters = recipe.synthesis.method == "dense_clusters"
    space = _CLUSTERS_LIMIT if clusters else _SAE_LIMIT
    if not made:
        return (*own, space)
    return (
        *own,
        space,
        "Rising coverage shows that the missing features fire, not that a model trained on the rows gets better.",
        f"The same {'clusters' if clusters else 'SAE'} chose the rows and measured them: coverage after is what was "
        "optimised, so compare it with the nulls beside it.",
    )


def aimed_at(recipe: FacSynthesis, coverage: Mapping[str, Any]) -> str:
    """Follows a sentence that ends with the missing features."""
    if recipe.synthesis.method == "random_features":
        return f"As a control, {coverage['chosen']:,} live features that are not missing were aimed at instead"
    return f"{coverage['chosen']:,} of the missing features were aimed at"


def _summary(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str:
    """By the rate test most missing features fire in the seed too: nobody may read that it lacks them."""
    missing, coverage = outputs["missing"].metrics, outputs["coverage"].metrics
    if not coverage["chosen"]:
        return "No rows: no feature was aimed at, because nothing was missing."
    rows = f"{outputs['dataset'].rows:,} synthetic rows"
    count = f"{missing['missing']:,} features were missing"
    gap = "lacks and the anchor dataset fires"
    if missing["test"] == "rate":
        gap = "fires more rarely than the anchor dataset"
        count += f" in this sense, {never_in_seed(missing)}" if missing["missing"] else " in this sense"
    if recipe.synthesis.method == "random_features":
        start = f"{rows} of a control in the search for features of a language model which the seed dataset {gap}"
    else:
        start = f"{rows}, made to fire features of a language model which the seed dataset {gap}"
    return f"{start}: {count}. {aimed_at(recipe, coverage)}."


def never_in_seed(missing: Mapping[str, Any]) -> str:
    """Follows the number of features that the rate test found missing: how many of them are truly absent."""
    never = missing["missing_by_both"]
    return f"{never:,} of which the seed never fires" if never else "all of which the seed fires at times"


def _how(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str:
    method = recipe.synthesis.method
    random = method == "random_features"
    start = (
        f"FAC Synthesis (arXiv 2602.10388), method `{method}`{'' if method == 'two_step' else ' (a control)'}. "
        f"{_space_sentence(recipe, outputs)}"
    )
    if not outputs["coverage"].metrics["chosen"]:
        return f"{start} No feature was aimed at, so the generator was asked for nothing."
    return (
        f"{start} For every chosen {'live' if random else 'missing'} feature"
        f"{', drawn at random from those that are not missing,' if random else ''} the generator was asked for "
        f"{_steps_sentence(recipe)} Texts that fire {'none of them' if random else 'no missing feature'}, copy a "
        "source or repeat one another were dropped."
    )


def _space_sentence(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str:
    """Where the features come from: a control has no SAE, and a loaded one has a name."""
    measure, space = recipe.measure, outputs["space"].metrics
    block = f"block {measure.layer} of `{public_name(measure.model.model, is_source=True) or measure.model.engine}`"
    if recipe.synthesis.method == "dense_clusters":
        return (
            f"In place of an SAE's features stand {space['width']:,} k-means clusters of the anchor's hidden states "
            f"after {block}, averaged over a row's own tokens; a row fires its nearest cluster alone."
        )
    loaded = loaded_sae(recipe, outputs)
    texts = "the anchor, the seed and a corpus" if "corpus" in outputs else "the anchor and the seed"
    sae = f"The SAE is {loaded}." if loaded else f"The SAE, of width {space['width']:,}, was trained on {texts}."
    return f"Features are read after {block}, pooled by their maximum over a row's own tokens. {sae}"


def _steps_sentence(recipe: FacSynthesis) -> str:
    """What step one and two were asked for, and what step two was shown."""
    synthesis = recipe.synthesis
    if synthesis.method == "one_step":
        return f"{synthesis.candidates + synthesis.generations} candidates in step one; there was no step two."
    steps = f"{synthesis.candidates} candidates in step one and {synthesis.generations} texts in step two."
    if synthesis.method == "anchor_row":
        return f"{steps} Step two was shown the anchor's strongest row in place of a contrastive pair."
    strong = "the feature's own candidates" if synthesis.pair == "own" else "the candidates of all features"
    weak = "beside the feature's weakest candidate" if synthesis.contrast else "without a weak example"
    return (
        f"{steps} Step two was shown the strongest of {strong}, or the anchor's strongest row where none fires the "
        f"feature, {weak}."
    )


def _stage_use(stage: Stage[Any], node: str, output: StageOutput) -> StageUse:
    manifest = output.manifest
    counts = manifest["counts"]
    return StageUse(
        name=node,
        version=int(manifest["fingerprint"]["parts"]["version"]),
        does=_STAGE_SENTENCES.get(stage.name) or _first_line(stage),
        attempted=counts["attempted"],
        accepted=counts["accepted"],
        rejected=counts["rejected"],
        fingerprint=str(manifest["fingerprint"]["digest"]),
    )


def _first_line(stage: Stage[Any]) -> str:
    """What a stage that came later says of itself: the class's own docstring, else its name."""
    lines = (type(stage).__doc__ or "").strip().splitlines()
    return lines[0] if lines else stage.name


def _measures(recipe: FacSynthesis, coverage: Mapping[str, Any], *, by_rate: bool) -> tuple[Measure, ...]:
    before, after = coverage["before"], coverage["after"]
    random = coverage.get("random_features")
    kept = " that the judge kept" if recipe.judge.engine is not None else ""
    against = (
        f"and {share(random['mean'])} of equally many random live features"
        if random
        else f"not compared with random live features because {why_no_null(coverage)}"
    )
    return (
        Measure(
            name="FAC",
            before=before["binary"],
            after=after["binary"],
            unit="share",
            hint=f"features of the anchor that fire, of {before['n_anchor']:,}; before: in the seed, after: in "
            "seed and new rows together",
        ),
        Measure(
            name="FAC of the new rows alone",
            before=None,
            after=coverage["new_alone"]["binary"],
            unit="share",
            hint="features of the anchor that the new rows fire without the seed",
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
            name="Missing features that fire",
            before=coverage["missing_before"],
            after=coverage["missing_after"],
            unit="share",
            hint=f"of {coverage['missing']:,} missing{kept}; the new rows alone fire "
            f"{share(coverage['missing_covered'])}, {against}",
        ),
        *([_never_measure(coverage)] if by_rate else []),
        Measure(
            name="Features aimed at that fire",
            before=coverage["chosen_before"],
            after=coverage["chosen_after"],
            unit="share",
            hint=f"of {coverage['chosen']:,} aimed at; the new rows alone fire {share(coverage['chosen_covered'])}",
        ),
    )


def _never_measure(coverage: Mapping[str, Any]) -> Measure:
    never = coverage["missing_never"]
    return Measure(
        name="Missing features that the seed never fires",
        before=0.0 if never else None,
        after=coverage["missing_never_covered"],
        unit="share",
        hint=f"of {never:,}; the other {coverage['missing'] - never:,} missing ones fire in it, but more rarely",
    )


def _models(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> tuple[ModelUse, ...]:
    """The models that had work to do: one that was asked for nothing wrote nothing."""
    roles = {
        "features.anchor": "gave the activations",
        "interpret": "judged the features",
        "texts.1": "wrote the user turns",
        "replies": "wrote the replies",
    }
    used = []
    for node, role in roles.items():
        if node not in outputs or not outputs[node].manifest["counts"]["attempted"]:
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
    loaded = loaded_sae(recipe, outputs)
    if loaded:
        used.append(
            ModelUse(
                role="named the features",
                name=loaded,
                revision=outputs["space"].content_hash[:16],
                licence="see the SAE's own card",
            )
        )
    return tuple(used)


def _sources(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> tuple[Source, ...]:
    sections = {"anchor": recipe.anchor, "seed": recipe.seed_data, "corpus": recipe.sae.corpus}
    return tuple(
        _source(node, section, outputs[node]) for node, section in sections.items() if section and node in outputs
    )


def _source(role: str, section: LoadConfig, output: StageOutput) -> Source:
    """The licence comes from the recipe: it changes no row, so a reused output would remember an old one."""
    return Source(
        role=role,
        name=public_name(str(output.metrics["source"]), is_source=True),
        rows=output.rows,
        licence=section.license,
        content_hash=output.content_hash[:16],
    )
