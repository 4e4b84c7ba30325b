"""The last sections of a FAC Synthesis report: the feature space, the stages with their cost, the lineage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwater.data_cards.blocks import Column, Section, TableBlock
from headwater.data_cards.numbers import format_number

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis


def space_section(outputs: Mapping[str, StageOutput]) -> Section:
    space = outputs["space"].metrics
    facts = [("width", space["width"], ""), ("hidden size", space["d_model"], "")]
    if space["source"] == "trained":
        recovered = space["loss_recovered"]
        facts += [
            ("tokens trained on", space["train_tokens"], ""),
            ("explained variance, held out", space["explained_variance"], ""),
            ("features per token (L0), held out", space["l0"], ""),
            ("dead features", space["dead_share"], "share"),
            ("loss recovered (1: the model predicts as well as without the SAE)", recovered["recovered"], ""),
        ]
    return Section(
        title="The feature space",
        blocks=(
            TableBlock(
                title="Sparse autoencoder",
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
        tokens = meter["tokens_in"] + meter["tokens_out"]
        rows.append(
            (
                node,
                counts["attempted"],
                counts["accepted"],
                counts["rejected"],
                manifest["seconds"],
                tokens,
                meter["dollars"],
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
