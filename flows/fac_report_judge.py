"""What the judge did, for report and card: which features it kept and why not the others, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from headwater.data_cards.blocks import Block, Column, Figures, Note, Prose, Section, TableBlock
from headwater.data_cards.chart_types import Bar, Bars, GroupedBars, Series
from headwater.data_cards.numbers import format_number
from headwater.flows.fac_report_facts import REASONS
from headwater.stages.fac.interpret import OVER_LIMIT, VERDICTS

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis

_LITTLE = 0.6
"""Mean scores below this say little more than a coin."""
_BINS = ((0.0, 0.5), (0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0))


@dataclass(frozen=True, slots=True)
class Judged:
    """The judge's work, counted."""

    asked: int
    """Features put to the judge."""
    over_limit: int
    """Features that were not put to it."""
    kept: int
    unreadable: int
    """Features left out because a reply could not be read."""
    detection: float | None
    """Mean balanced accuracy over the features that have one: 0.5 is chance."""
    fuzzing: float | None
    scored: int
    """Features with at least one of the two scores."""
    unanswered: int
    """Texts of detection and fuzzing that got no readable answer."""


def judged(outputs: Mapping[str, StageOutput]) -> Judged | None:
    """The counts; None when there was no judge."""
    if "interpret" not in outputs:
        return None
    kept = outputs["interpret"].read()
    reasons = dict(outputs["interpret"].manifest["reasons"])
    over_limit = reasons.pop(OVER_LIMIT, 0)
    return Judged(
        over_limit=over_limit,
        asked=kept.height + sum(reasons.values()),
        kept=kept.height,
        unreadable=sum(count for reason, count in reasons.items() if reason not in VERDICTS),
        detection=_mean(kept["detection"]),
        fuzzing=_mean(kept["fuzzing"]),
        scored=kept.filter(pl.col("detection").is_not_null() | pl.col("fuzzing").is_not_null()).height,
        unanswered=int(kept["unanswered"].sum()),
    )


def relevance_note(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> str:
    """Which features count: those that a judge kept, or every live one."""
    found = judged(outputs)
    if found is None:
        return "No judge was configured, so every live feature counts as relevant to the task."
    asked = (
        "explained, confirmed and found relevant to the task"
        if recipe.judge.task
        else "explained and confirmed (relevance was not asked: `judge.task` is empty)"
    )
    beyond = f" {found.over_limit:,} more, beyond `judge.settings.limit`, were left out." if found.over_limit else ""
    counts = (
        "FAC counts these alone."
        if recipe.judge.scope == "anchor"
        else "Of the missing features these alone count; FAC counts every live feature of the anchor, for the judge "
        "was not asked about those that the seed fires (`judge.scope`)."
    )
    kept = f"The judge kept {found.kept:,} of the {found.asked:,} features put to it: those that it {asked}."
    return f"{kept}{beyond} {counts}"


def judge_section(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> Section | None:
    """None when there was no judge."""
    found = judged(outputs)
    if found is None:
        return None
    output = outputs["interpret"]
    reasons = sorted(
        ((reason, count) for reason, count in output.manifest["reasons"].items() if reason != OVER_LIMIT),
        key=lambda item: (-item[1], item[0]),
    )
    outcome = Bars(
        title="What became of the features put to the judge",
        bars=(
            Bar(label="kept", value=found.kept),
            *(Bar(label=REASONS.get(reason, reason), value=count) for reason, count in reasons),
        ),
        why_empty="no feature was put to the judge",
    )
    blocks: list[Block] = [Prose(text=_how(recipe, found)), Figures(charts=(outcome, _scores(outputs)))]
    if _says_little(found):
        blocks.append(
            Note(
                level="warning",
                title="These explanations predict little",
                points=("Their scores are near chance (0.5): read them as guesses, and use a stronger judge.",),
            )
        )
    blocks.append(_left_out(outputs))
    return Section(title="What the judge said", blocks=tuple(blocks))


def _how(recipe: FacSynthesis, found: Judged) -> str:
    text = (
        "The judge explained each feature from anchor texts that fire it, strong and weak, and was then asked in a "
        "chat of its own whether the explanation holds. The generator's prompts quote the explanation."
    )
    if found.unreadable:
        text += f" Features left out because a reply could not be read: {found.unreadable:,}."
    text += "\n\n"
    if not recipe.judge.settings.score:
        return f"{text}How well the explanations predict was not measured (`judge.settings.score` is false)."
    if not found.scored:
        return f"{text}No explanation has a score: none was kept, or too few texts or readable answers were there."
    text += (
        "The scores say how well an explanation predicts on texts that it was not made from (balanced accuracy; "
        "0.5 is chance). **Detection**: which texts fire the feature? **Fuzzing**: is the marked token the one that "
        f"fires it? Mean detection {format_number(found.detection)}, mean fuzzing {format_number(found.fuzzing)}, over "
        f"{found.scored:,} of {found.kept:,} features"
        + ("." if found.scored == found.kept else "; the others fire in too few texts or got no readable answers.")
    )
    if found.unanswered:
        text += f" Texts without a readable answer, which count neither way: {found.unanswered:,}."
    return text


def _scores(outputs: Mapping[str, StageOutput]) -> GroupedBars:
    kept = outputs["interpret"].read()
    return GroupedBars(
        title="How well the explanations predict",
        caption="Features by their score: balanced accuracy, where 0.5 is chance and 1 is perfect.",
        categories=("below 0.5", *(f"{low}–{high:g}" for low, high in _BINS[1:])),
        series=tuple(Series(name=name, values=_counts(kept[name])) for name in ("detection", "fuzzing")),
        why_empty="no explanation was scored",
    )


def _left_out(outputs: Mapping[str, StageOutput]) -> TableBlock:
    features = outputs["missing"].read().select("id", "feature")
    turned_down = outputs["interpret"].rejects().filter(pl.col("reason") != OVER_LIMIT)
    rejects = turned_down.join(features, on="id", how="left").sort("reason", "feature")
    rows = []
    for row in rejects.iter_rows(named=True):
        explanation = (
            row["detail"].removeprefix(f"feature {row['feature']}: ") if row["reason"] in VERDICTS[1:] else None
        )
        rows.append((str(row["feature"]), REASONS.get(row["reason"], row["reason"]), explanation))
    return TableBlock(
        title="Features left out",
        caption="With the judge's replies: `pipeline rows RUN --stage interpret --rejects`",
        columns=(Column(title="feature"), Column(title="why"), Column(title="explanation")),
        rows=tuple(rows),
        why_empty="the judge kept them all",
    )


def _says_little(found: Judged) -> bool:
    means = [mean for mean in (found.detection, found.fuzzing) if mean is not None]
    return bool(means) and max(means) < _LITTLE


def _mean(scores: pl.Series) -> float | None:
    values = scores.drop_nulls().to_list()
    return sum(values) / len(values) if values else None


def _counts(scores: pl.Series) -> tuple[int | None, ...]:
    """Scores per bin; the last bin holds 1 too. No values at all when there is no score: the chart is then empty."""
    values = scores.drop_nulls().to_list()
    if not values:
        return (None,) * len(_BINS)
    # Scores are stored as float32 and 0.6 must not fall below 0.6.
    bins = [max(at for at, (low, _) in enumerate(_BINS) if value >= low - 1e-6) for value in values]
    return tuple(bins.count(at) for at in range(len(_BINS)))
