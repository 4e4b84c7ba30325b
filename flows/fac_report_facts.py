"""The last sections of a FAC Synthesis report: the feature space, the stages with their cost, the lineage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.data_cards.blocks import Column, Section, TableBlock
from headwater.data_cards.numbers import format_number
from headwater.data_cards.places import public_name

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis


REASONS = {
    "missing_column": "lacks the text's or the chat's column",
    "fires_no_missing_feature": "no missing feature reaches δ",
    "copies_source": "copies an anchor or seed row",
    "near_duplicate": "near-duplicate of a stronger row",
    "over_budget": "enough stronger rows fire the same features",
    "cut_at_length": "cut at the length limit",
    "empty_reply": "empty reply",
    "error_reply": "an error in place of a reply",
    "several_lines": "spans several lines",
    "no_usable_reply": "no usable reply",
    "cannot_tell": "judge: the texts share nothing",
    "not_verified": "judge: explanation not confirmed",
    "irrelevant": "judge: the task does not need it",
    "over_limit": "not put to the judge: beyond `judge.settings.limit`",
    "no_answer": "judge: no line with the answer",
    "conflicting_answers": "judge: several answers",
    "unfinished_reasoning": "judge: reasoning cut off",
    "echoed_template": "judge: repeats the prompt",
    "explanation_too_long": "judge: explanation too long",
    "unknown_label": "judge: verdict is no agreed word",
}
"""What a reject's reason code means, for readers."""


def why_no_null(coverage: Mapping[str, Any]) -> str:
    """Why a null is not there: the stored reason, as the end of a sentence."""
    stored = str(coverage.get("why_not") or "").strip().rstrip(".")
    if stored:
        return stored[0].lower() + stored[1:]
    return "nothing was missing" if not coverage["missing"] else "no row was made"


def loaded_sae(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str | None:
    """Name, width and place of an SAE that somebody else trained; None when the run made its own feature space.

    Of a path only the end: the rest tells of one machine.
    """
    load = recipe.sae.load
    if load is None or outputs["space"].metrics["source"] != "loaded":
        return None
    source = Path(load.source)
    name = "/".join(filter(None, (source.name or source.resolve().name, load.sae_id)))
    made = outputs["space"].read().row(0, named=True)
    model = public_name(str(made["model"]), is_source=True)
    return f"{name} (width {made['width']:,}, layer {made['layer']} of {model})"


def space_section(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> Section:
    space = outputs["space"].metrics
    loaded = loaded_sae(recipe, outputs)
    facts = [("width", space["width"], ""), ("hidden size", space["d_model"], "")]
    if loaded:
        facts.insert(0, ("loaded", loaded, ""))
    if space["source"] == "trained":
        facts.append(("tokens trained on", space["train_tokens"], ""))
    if "loss_recovered" in space:
        # Whose texts each figure was measured on: held out, trained on, or the anchor's when others trained the SAE.
        held, seen, mixed = (
            ("held out", "on texts trained on", "mostly on texts trained on")
            if space["source"] == "trained"
            else ("on the anchor",) * 3
        )
        recovered = space["loss_recovered"]["recovered"]
        facts += [
            (f"explained variance, {held}", space["explained_variance"], ""),
            (f"features per token (L0), {held}", space["l0"], ""),
            (f"dead features, {seen}", space["dead_share"], "share"),
            (f"loss recovered, {mixed} (1: the model predicts as well as without the SAE)", recovered, ""),
        ]
    return Section(
        title="The feature space",
        blocks=(
            TableBlock(
                title="Clusters of hidden states" if space["source"] == "clusters" else "Sparse autoencoder",
                columns=(Column(title="fact"), Column(title="value")),
                rows=tuple((name, share(value) if unit == "share" else value) for name, value, unit in facts),
            ),
        ),
    )


def stages_section(outputs: Mapping[str, StageOutput]) -> Section:
    rows = []
    for node, output in outputs.items():
        manifest = output.manifest
        counts, meter = manifest["counts"], manifest["meter"]
        tokens = meter["tokens_in"] + meter["tokens_out"] or None
        rows.append(
            (
                node,
                counts["attempted"],
                counts["accepted"],
                counts["rejected"],
                manifest["seconds"],
                tokens,
                meter["dollars"] or None,
            )
        )
    return Section(
        title="Stages and what they cost",
        blocks=(
            TableBlock(
                title="Stages",
                caption="Time and cost of making each output; a reused output cost nothing this time.",
                columns=(
                    Column(title="stage"),
                    Column(title="attempted"),
                    Column(title="accepted"),
                    Column(title="rejected"),
                    Column(title="time", unit="s"),
                    Column(title="tokens"),
                    Column(title="cost", unit="$"),
                ),
                rows=tuple(rows),
            ),
        ),
    )


def lineage(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> tuple[tuple[str, str], ...]:
    manifest = outputs["dataset"].manifest
    facts = [("dataset fingerprint", str(manifest["fingerprint"]["digest"])), ("run seed", str(recipe.seed))]
    for node in ("features.anchor", "texts.1", "replies", "interpret"):
        if node in outputs:
            for name, identity in outputs[node].manifest["models"].items():
                facts.append((f"{node} {name}", f"{identity['model']} {identity['revision'][:12]} {identity['dtype']}"))
    return (*facts, *sorted(manifest["libraries"].items()))


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return format_number(value, "share")
