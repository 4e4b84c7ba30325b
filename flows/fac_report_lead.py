"""The first paragraph of a FAC Synthesis report: what is missing, in words that are true of the test that found it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwater.flows.fac_card import aimed_at, never_in_seed
from headwater.flows.fac_report_facts import share
from headwater.flows.fac_report_judge import relevance_note

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis


def lead(
    recipe: FacSynthesis, outputs: Mapping[str, StageOutput], coverage: Mapping[str, Any], missing: Mapping[str, Any]
) -> str:
    """The finding in a few sentences."""
    if not missing["missing"]:
        return _nothing_missing(missing)
    model = outputs["features.anchor"].manifest["models"]["model"]["model"]
    by_rate = missing["test"] == "rate"
    gap = (
        f"fires {missing['missing']:,} of them more rarely, {never_in_seed(missing)}"
        if by_rate
        else f"lacks {missing['missing']:,} of them"
    )
    start = f"The anchor dataset fires {missing['live_in_anchor']:,} features of {model}; the seed dataset {gap}."
    note = relevance_note(recipe, outputs)
    if not outputs["dataset"].rows:
        return f"{start} {aimed_at(recipe, coverage)}, and no row was made. {note}"
    seed = f" (in the seed: {share(coverage['chosen_before'])})" if coverage["chosen_before"] else ""
    sentences = [
        f"{start} {aimed_at(recipe, coverage)}, and {share(coverage['chosen_covered'])} of those fire in at least one "
        f"of {outputs['dataset'].rows:,} new rows{seed}."
    ]
    if coverage["missing"]:
        judged = "" if recipe.judge.engine is None else " that the judge kept"
        sentences.append(f"Of all {coverage['missing']:,} missing features{judged} {_new_rows_fire(coverage)}.")
    if by_rate and coverage["missing_never"]:
        never = f"{coverage['missing_never']:,}"
        sentences.append(
            f"Of the {never} that the seed never fires they fire {share(coverage['missing_never_covered'])}."
        )
    return " ".join([*sentences, note])


def _new_rows_fire(coverage: Mapping[str, Any]) -> str:
    """Beside what the seed fires already, and what any text would."""
    against = [f"{share(coverage['missing_before'])} in the seed"] if coverage["missing_before"] else []
    if coverage.get("random_features"):
        against.append(f"{share(coverage['random_features']['mean'])} of equally many random live features")
    return f"the new rows fire {share(coverage['missing_covered'])}" + (
        f", against {' and '.join(against)}" if against else ""
    )


def _nothing_missing(missing: Mapping[str, Any]) -> str:
    seed, anchor = f"the seed ({missing['seed_rows']:,} rows)", f"the anchor ({missing['anchor_rows']:,} rows)"
    if not missing["live_in_anchor"]:
        return (
            f"Nothing could be missing: {anchor} fires no feature above δ = {missing['delta']:.3g} in at least "
            f"{missing['min_support']:,} rows."
        )
    if missing["test"] == "set_difference":
        return (
            f"Nothing is missing: {seed} fires every feature that {anchor} fires in at least "
            f"{missing['min_support']:,} rows."
        )
    never = missing["missing_by_set_difference"]
    return f"Nothing is missing: {seed} fires no feature more rarely than {anchor} by the rate test" + (
        f", though it never fires {never:,} that the anchor does." if never else "."
    )
