"""A realistic report of an FAC run, shared by the tests of this folder. Its numbers are made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headwater.data_cards.report import (
    Bar,
    Bars,
    BeforeAfter,
    Column,
    Example,
    Examples,
    Figures,
    Funnel,
    GroupedBars,
    Headline,
    Histogram,
    Line,
    Lines,
    Mark,
    Note,
    Pair,
    Prose,
    Reference,
    Report,
    Section,
    Series,
    Step,
    TableBlock,
    render_report,
)

HEADLINES = (
    Headline(label="Missing features", value=298, hint="of 1,412 the anchor fires"),
    Headline(label="Now fired by a new row", value=0.8034, unit="share", hint="random live features: 12.1%"),
    Headline(label="Rows accepted", value=1186, hint="of 4,768 candidates"),
    Headline(label="FAC", value=0.942, hint="before: 0.789"),
    Headline(label="Time", value=312.4, unit="s", hint="2 cores, 118,204 tokens"),
)

SWEEP = Lines(
    title="Coverage of the missing set over the threshold δ",
    caption="Share of `F_miss(δ)` fired by the synthetic rows; the band is the 5–95 % range over 15 random draws.",
    unit="share",
    x_label="δ (SAE activation)",
    y_label="share of missing features fired",
    lines=(
        Line(
            name="missing features",
            x=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
            y=(1.0, 0.98, 0.95, 0.9, 0.803, 0.66, 0.45),
        ),
        Line(
            name="random live features",
            x=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
            y=(0.42, 0.31, 0.22, 0.17, 0.121, 0.08, 0.05),
            low=(0.35, 0.25, 0.16, 0.12, 0.08, 0.05, 0.02),
            high=(0.5, 0.38, 0.29, 0.23, 0.17, 0.12, 0.09),
            muted=True,
        ),
    ),
    references=(Reference(at=2.0, label="δ used"), Reference(at=0.5, label="half of them", axis="y")),
)

ACTIVATIONS = Histogram(
    title="Activation of missing features",
    caption="The largest activation of each missing feature, in the anchor and in the synthetic rows.",
    edges=tuple(0.5 * step for step in range(25)),
    series=(
        Series(
            name="anchor", values=tuple(round(60 * math.exp(-((step - 8) ** 2) / 30)) for step in range(24)), muted=True
        ),
        Series(name="synthetic", values=tuple(round(45 * math.exp(-((step - 5) ** 2) / 18)) for step in range(24))),
    ),
    x_label="activation",
    y_label="features",
    references=(Reference(at=2.0, label="δ = 2"),),
)

COVERAGE = GroupedBars(
    title="Coverage before and after",
    caption="FAC by three weightings. The seed alone, then the seed with the synthetic rows.",
    unit="share",
    categories=("binary", "frequency-weighted", "magnitude-weighted"),
    series=(
        Series(name="seed", values=(0.789, 0.912, 0.874), muted=True),
        Series(name="seed + synthetic", values=(0.942, 0.981, 0.966)),
        Series(name="seed + random rows", values=(0.812, 0.92, 0.886)),
    ),
)

BY_KIND = BeforeAfter(
    title="Coverage by kind of task",
    unit="share",
    pairs=(
        Pair(label="python_bug", before=0.41, after=0.86),
        Pair(label="regex", before=0.38, after=0.79),
        Pair(label="music_theory", before=0.52, after=0.71),
        Pair(label="history_cause", before=0.63, after=0.84),
        Pair(label="recipe", before=0.97, after=0.98),
        Pair(label="no rows of this kind were scored", before=None, after=None),
    ),
)

FUNNEL = Funnel(
    title="Yield per step",
    steps=(
        Step(label="missing features × candidates", count=4768, hint="16 per feature"),
        Step(label="usable replies", count=4102, hint="not empty, not cut"),
        Step(label="fire the feature above δ", count=2210),
        Step(label="not a near-duplicate", count=1391),
        Step(label="no copy of the anchor", count=1186),
    ),
)

REJECTS = Bars(
    title="Rejected rows by reason",
    bars=(
        Bar(label="below_threshold", value=1892, hint="does not fire the feature it was written for"),
        Bar(label="near_duplicate", value=819),
        Bar(label="cut_at_length", value=507),
        Bar(label="copies_anchor", value=205),
        Bar(label="empty_reply", value=159),
    ),
)

ROWS = Examples(
    title="Rows that serve a feature the seed never fires",
    caption="Highlighted: the token with the largest activation, with its span.",
    unfolded=2,
    items=(
        Example(
            text="How do I write a regex that matches only lines without a trailing comma?",
            marks=(Mark(start=17, end=22, label="activation 6.21"), Mark(start=36, end=46)),
            badges=("feature 2,114", "activation 6.21", "pair: pooled"),
            fields=(("explanation", "patterns that match text"), ("anchor row", "What strings does ^\\d{3}$ accept?")),
        ),
        Example(
            text="Which causes of the war do people still argue about, and <b>why</b>?",
            marks=(Mark(start=6, end=12),),
            badges=("feature 87", "activation 4.08", "fallback"),
        ),
        Example(text="Transpose the tune up a third.", badges=("feature 911", "activation 3.5")),
        Example(text="是什么原因?", badges=("feature 12", "activation 2.2")),
    ),
)

FEATURES = TableBlock(
    title="Missing features with the most support",
    caption="Sorted by the share of anchor rows that fire them; click a title to sort.",
    columns=(
        Column(title="feature"),
        Column(title="explanation"),
        Column(title="anchor rate", unit="share"),
        Column(title="seed rate", unit="share"),
        Column(title="top activation"),
        Column(title="rows written"),
    ),
    rows=(
        ("2114", "patterns that match text", 0.0417, 0.0, 7.114, 12),
        ("87", "causes and blame", 0.0327, 0.0, 6.02, 8),
        ("911", "intervals and keys", 0.0298, 0.0, 5.57, None),
        ("3020", "code that raises an error", 0.0268, 0.0078, 9.9, 15),
    ),
)


def make_report(**changes: Any) -> Report:
    """The sample report with some fields replaced."""
    facts: dict[str, Any] = {
        "title": "FAC synthesis",
        "subtitle": "`fac-synthesis` on 336 anchor and 128 seed rows, SmolLM2-135M-Instruct, layer 15",
        "lead": "The seed misses **298 of 1,412** features that the anchor fires. After the run, new rows fire 80.3% "
        "of them, against 12.1% of as many random live features.",
        "headlines": HEADLINES,
        "not_shown": (
            "A generator of 135M parameters writes on-form rows whose content is often silly: read the examples.",
            "That a feature fires says nothing about whether a model trained on the row gets better.",
            "No judge was configured: every live feature counts as relevant.",
        ),
        "sections": (
            Section(title="Coverage", blocks=(Figures(charts=(COVERAGE,)), Figures(charts=(SWEEP, ACTIVATIONS)))),
            Section(
                title="Where it helped",
                blocks=(
                    Prose(
                        text="Kinds absent from the seed gain most.\n\nKinds it has gain **little**, as they should."
                    ),
                    Figures(charts=(BY_KIND,)),
                    FEATURES,
                ),
            ),
            Section(
                title="Yield",
                blocks=(
                    Figures(charts=(FUNNEL,)),
                    Figures(charts=(REJECTS,)),
                    Note(title="Fallbacks", points=("8 of 60 features took their good example from the anchor.",)),
                ),
            ),
            Section(title="Examples", blocks=(ROWS,)),
        ),
        "lineage": (
            ("fingerprint", "3f9a1c" * 8),
            ("seed of the run", "0"),
            ("model", "SmolLM2-135M-Instruct (sha256:0f8a2b6d)"),
            ("versions", "headwater 0.1.0, polars 2.1.0, torch 2.13.0"),
        ),
        "command": "pipeline run fac-synthesis --direct",
    }
    return Report(**(facts | changes))


if __name__ == "__main__":
    import sys

    Path(sys.argv[1]).write_text(render_report(make_report()), "utf-8")
