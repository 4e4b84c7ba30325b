"""The report of a FAC Synthesis run: what was missing, what was made, what it changes, and what that does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.data_cards.blocks import (
    Block,
    Column,
    Example,
    Examples,
    Figures,
    Headline,
    Note,
    Prose,
    Report,
    Section,
    TableBlock,
)
from headwater.data_cards.chart_types import (
    Bar,
    Bars,
    BeforeAfter,
    Funnel,
    Histogram,
    Line,
    Lines,
    Pair,
    Reference,
    Series,
    Step,
)
from headwater.flows.fac_card import limits
from headwater.flows.fac_report_facts import REASONS, lineage, share, space_section, stages_section, why_no_null
from headwater.flows.fac_report_judge import judge_section
from headwater.flows.fac_report_lead import lead

if TYPE_CHECKING:
    from headwater.core.store import StageOutput
    from headwater.flows.fac_synthesis import FacSynthesis
    from headwater.flows.runs import Run

_EXAMPLES = 24


def build_report(recipe: FacSynthesis, run: Run, outputs: Mapping[str, StageOutput]) -> Report:
    """All numbers come from the outputs' metrics and manifests."""
    coverage, missing = outputs["coverage"].metrics, outputs["missing"].metrics
    sections = (
        _coverage_section(outputs, coverage),
        _examples_section(recipe, outputs),
        _missing_section(outputs, coverage, missing),
        judge_section(recipe, outputs),
        _synthesis_section(recipe, outputs),
        space_section(recipe, outputs),
        stages_section(outputs),
    )
    return Report(
        title=recipe.title or f"{recipe.pipeline}: what the seed has too little of, and rows that add it",
        subtitle=f"Run {run.path.name} of {recipe.pipeline}",
        lead=lead(recipe, outputs, coverage, missing),
        headlines=_headlines(outputs, coverage, missing),
        not_shown=limits(recipe, made=outputs["dataset"].rows > 0),
        sections=tuple(section for section in sections if section is not None),
        lineage=lineage(recipe, outputs),
        command=f"pipeline run {recipe.pipeline} -c recipe.yaml",
    )


def _headlines(
    outputs: Mapping[str, StageOutput], coverage: Mapping[str, Any], missing: Mapping[str, Any]
) -> tuple[Headline, ...]:
    return (
        Headline(label="New rows", value=outputs["dataset"].rows, hint="after all filters"),
        Headline(
            label="Missing features",
            value=missing["missing"],
            hint=f"of {missing['live_in_anchor']:,} in the anchor"
            + (f"; {missing['missing_by_both']:,} never fire in the seed" if missing["test"] == "rate" else ""),
        ),
        Headline(
            label="Aimed at and fired",
            value=coverage["chosen_covered"],
            unit="share",
            hint=f"of {coverage['chosen']:,} chosen features; in the seed alone: {share(coverage['chosen_before'])}",
        ),
        Headline(
            label="Anchor covered (FAC)",
            value=coverage["after"]["binary"],
            unit="share",
            hint=f"in the seed alone: {share(coverage['before']['binary'])}",
        ),
    )


def _coverage_section(outputs: Mapping[str, StageOutput], coverage: Mapping[str, Any]) -> Section:
    before, after = coverage["before"], coverage["after"]
    weights = (("binary", "FAC"), ("frequency", "weighted by frequency"), ("magnitude", "weighted by magnitude"))
    pairs = [Pair(label=label, before=before[key], after=after[key]) for key, label in weights]
    pairs.append(Pair(label="missing features", before=coverage["missing_before"], after=coverage["missing_after"]))
    if outputs["missing"].metrics["test"] == "rate" and coverage["missing_never"]:
        pairs.append(Pair(label="of these, never in the seed", before=0.0, after=coverage["missing_never_covered"]))
    points = outputs["coverage"].read().sort("quantile")
    quantiles = tuple(points["quantile"].to_list())
    blocks: list[Block] = [
        Figures(
            charts=(
                BeforeAfter(
                    title="Share of the anchor's features that fire",
                    caption="Before: the seed alone. After: the seed together with the new rows. The new rows alone "
                    f"fire {share(coverage['new_alone']['binary'])} (FAC), and {share(coverage['missing_covered'])} of "
                    "the missing features.",
                    unit="share",
                    pairs=tuple(pairs),
                ),
                Lines(
                    title="The same at other thresholds δ",
                    caption="δ as a quantile of the anchor's positive activations; the line marks this run's."
                    + (" What is missing at other δ alone was not judged." if "interpret" in outputs else ""),
                    unit="share",
                    x_label="quantile that is δ",
                    y_label="share",
                    lines=(
                        Line(name="FAC before", x=quantiles, y=tuple(points["fac_before"].to_list()), muted=True),
                        Line(name="FAC after", x=quantiles, y=tuple(points["fac_after"].to_list())),
                        Line(name="missing features before", x=quantiles, y=tuple(points["missing_before"].to_list())),
                        Line(name="missing features after", x=quantiles, y=tuple(points["missing_after"].to_list())),
                    ),
                    references=_run_delta(outputs),
                ),
            )
        ),
        _nulls(coverage, by_rate=outputs["missing"].metrics["test"] == "rate"),
    ]
    return Section(title="Coverage before and after", blocks=tuple(blocks))


def _run_delta(outputs: Mapping[str, StageOutput]) -> tuple[Reference, ...]:
    quantile = outputs["missing"].metrics["delta_quantile"]
    return () if quantile is None else (Reference(at=quantile, label="this run"),)


def _nulls(coverage: Mapping[str, Any], *, by_rate: bool) -> Block:
    rows: list[tuple[str, float, float | None]] = []
    random, matched = coverage.get("random_features"), coverage.get("length_matched_anchor")
    if random:
        rows.append(("Missing features, fired by the new rows", random["observed"], None))
        rows.append(("Missing features, fired by the seed", coverage["missing_before"], None))
        if by_rate and coverage["missing_never"]:
            label = f"The {coverage['missing_never']:,} missing ones that the seed never fires, fired by the new rows"
            rows.append((label, coverage["missing_never_covered"], None))
        rows.append(("Random live features, fired by the new rows", random["mean"], random["q95"]))
    if matched:
        label = f"Missing features, fired by {matched['rows']:,} new rows matched in length"
        rows.append((label, matched["observed"], None))
        rows.append(
            ("Missing features, fired by as many anchor rows of the same lengths", matched["mean"], matched["q95"])
        )
    caption = (
        "Random features: what any text fires. Anchor rows of the same number and lengths: what real rows of the kind "
        "would reach; longer texts fire more features, so lengths are held."
    )
    if random and not matched:
        caption += f" There are no such anchor rows here because {why_no_null(coverage)}."
    return TableBlock(
        title="Beside its nulls",
        caption=caption,
        columns=(
            Column(title="what"),
            Column(title="share (null: mean of the draws)", unit="share"),
            Column(title="95 % of the draws below", unit="share"),
        ),
        rows=tuple(rows),
        why_empty=why_no_null(coverage),
    )


def _missing_section(
    outputs: Mapping[str, StageOutput], coverage: Mapping[str, Any], missing: Mapping[str, Any]
) -> Section:
    histogram = coverage["activation_histogram"]
    test = (
        f"fires more often in the anchor than in the seed (Fisher's exact test, level {missing['alpha']:g}"
        + (", false discoveries controlled)" if missing["control_false_discoveries"] else ")")
        if missing["test"] == "rate"
        else "fires in the anchor and never in the seed"
    )
    blocks: list[Block] = [
        Prose(
            text=f"A feature is missing when it {test} and at least {missing['min_support']} anchor rows fire it. "
            f"A row fires a feature when its largest activation exceeds δ = {missing['delta']:.3g}. By set difference "
            f"{missing['missing_by_set_difference']:,} features would be missing; {missing['missing_by_both']:,} are "
            "missing by both definitions"
            + (": the seed fires the others too, only more rarely." if missing["test"] == "rate" else ".")
        ),
        Figures(
            charts=(
                Histogram(
                    title="How strongly missing features fire",
                    caption="Per row and feature, activations above 0; the bars of each colour add up to 100%.",
                    unit="share",
                    edges=tuple(histogram["edges"]),
                    series=(
                        Series(name="anchor rows", values=_shares(histogram["anchor"]), muted=True),
                        Series(name="new rows", values=_shares(histogram["new"])),
                    ),
                    x_label="activation",
                    y_label="share of pairs of row and feature",
                    references=(Reference(at=histogram["delta"], label="δ"),),
                ),
            )
        ),
        _features_table(outputs),
    ]
    if missing["warnings"]:
        blocks.append(Note(level="warning", title="Read these numbers with care", points=tuple(missing["warnings"])))
    return Section(title="What was missing", blocks=tuple(blocks))


def _shares(counts: Sequence[int]) -> tuple[float | None, ...]:
    """New rows are few beside the anchor's: as counts they would not be seen."""
    total = sum(counts)
    return tuple(count / total if total else None for count in counts)


def _features_table(outputs: Mapping[str, StageOutput]) -> Block:
    has_judge = "interpret" in outputs
    features = outputs["targets"].read().filter("chosen").sort("p_value", "feature")
    served: dict[int, int] = {}
    for fires in outputs["dataset"].read()["fires"].to_list():
        for feature in fires:
            served[feature] = served.get(feature, 0) + 1
    rows = []
    for row in features.iter_rows(named=True):
        span = row["spans"][0]["text"] if row["spans"] else None
        meaning = (row["explanation"], span) if has_judge else (span,)
        counts = (row["anchor_support"], row["seed_support"], served.get(row["feature"], 0))
        scores = (row["detection"], row["fuzzing"]) if has_judge else ()
        rows.append((str(row["feature"]), *meaning, *counts, *scores))
    titles = [
        "feature",
        *(["explanation"] if has_judge else []),
        "strongest anchor text, peak marked",
        *("anchor rows", "seed rows", "new rows"),
        *(["detection", "fuzzing"] if has_judge else []),
    ]
    return TableBlock(
        title="The features aimed at",
        caption="Rows: how many of them fire the feature above δ.",
        columns=tuple(Column(title=title) for title in titles),
        rows=tuple(rows),
        why_empty="the judge kept none" if has_judge and features.is_empty() else "nothing was missing",
    )


def _synthesis_section(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> Section:
    steps = outputs["select"].metrics["steps"]
    blocks: list[Block] = []
    charts = []
    random = recipe.synthesis.method == "random_features"
    for number, step in steps.items():
        asked = outputs[f"prompts.{number}"].rows
        charts.append(
            Funnel(
                title="Step one: candidates" if number == "1" else f"Step two: from {_shown(recipe)}",
                steps=(
                    Step(label="asked for", count=asked),
                    Step(label="usable replies", count=step["texts"]),
                    Step(
                        label="fire a live feature drawn" if random else "fire a missing feature",
                        count=step["fire_a_missing_feature"],
                    ),
                    Step(
                        label="no copy, no near-duplicate",
                        count=step["fire_a_missing_feature"] - step["copies"] - step["near_duplicates"],
                    ),
                    Step(label="kept within budget", count=step["selected"]),
                ),
            )
        )
    if charts:
        blocks.append(Figures(charts=tuple(charts[:2])))
    if "prompts.2" in outputs and outputs["prompts.2"].rows:
        blocks.append(Prose(text=_pairs_sentence(outputs["prompts.2"].metrics)))
    blocks.append(Figures(charts=(_rejects_chart(outputs),)))
    return Section(title="Yield per step", blocks=tuple(blocks))


def _shown(recipe: FacSynthesis) -> str:
    """What step two was shown."""
    if recipe.synthesis.method == "anchor_row":
        return "the anchor's row"
    return "the pair" if recipe.synthesis.contrast else "the strong example alone"


def _pairs_sentence(pairs: Mapping[str, Any]) -> str:
    return (
        f"The strong example came from {_SOURCES[pairs['source']]}. The anchor's own row stood in for "
        f"{share(pairs['fallback_share'])} of the features; with a feature's own candidates alone it would be "
        f"{share(pairs['fallback_share_own'])}, with all features' candidates "
        f"{share(pairs['fallback_share_pooled'])}."
    )


_SOURCES = {
    "pooled": "the candidates of all features",
    "own": "the feature's own candidates",
    "anchor_row": "the anchor itself (a control, no pair shown)",
}


def _rejects_chart(outputs: Mapping[str, StageOutput]) -> Bars:
    bars = [
        Bar(label=f"{REASONS.get(reason, reason)} · {node}", value=count)
        for node, output in outputs.items()
        for reason, count in output.manifest["reasons"].items()
    ]
    return Bars(
        title="Rejects by reason",
        caption="Every rejected row is kept with its reason: `pipeline rows RUN --stage STAGE --rejects`",
        bars=tuple(sorted(bars, key=lambda bar: -(bar.value or 0))),
        why_empty="nothing was rejected",
    )


def _examples_section(recipe: FacSynthesis, outputs: Mapping[str, StageOutput]) -> Section:
    kind = "drawn" if recipe.synthesis.method == "random_features" else "missing"
    dataset = outputs["dataset"].read()
    # Ids are hashes, so their order is a draw by chance that stays the same. The strongest rows would flatter.
    rows = dataset.sort("id").head(_EXAMPLES)
    items = []
    for row in rows.iter_rows(named=True):
        user, *rest = row["messages"]
        fields = [("reply", message["content"]) for message in rest]
        if row["explanation"]:
            fields.append(("feature means", row["explanation"]))
        fires = len(row["fires"])
        items.append(
            Example(
                text=user["content"],
                badges=(
                    f"for feature {row['feature']}",
                    f"activation {row['activation']:.3g}",
                    f"fires {fires:,} {kind} feature{'' if fires == 1 else 's'}",
                ),
                fields=tuple(fields),
            )
        )
    return Section(
        title="Rows to look at",
        blocks=(
            Examples(
                title=f"{rows.height:,} of {dataset.height:,} new rows, drawn by chance" if items else "New rows",
                caption="All of them: `pipeline rows RUN`" if items else "",
                items=tuple(items),
                why_empty="no row was made",
            ),
        ),
    )
