"""The page escapes what it shows, says what is empty, and carries nothing that a browser would fetch."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from pydantic import ValidationError
from report_samples import make_report

from headwater.data_cards.report import (
    Bar,
    Bars,
    Column,
    Example,
    Examples,
    Figures,
    Headline,
    Mark,
    Note,
    Prose,
    Section,
    TableBlock,
    render_report,
)

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Outline(HTMLParser):
    """Checks nesting and collects tags, ids and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def page_of(*blocks: object) -> str:
    return render_report(make_report(sections=(Section(title="Only", blocks=blocks),)))


def test_the_page_is_well_nested_and_its_ids_are_unique() -> None:
    outline = Outline(render_report(make_report()))
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 12


def test_nothing_in_the_page_points_anywhere_else() -> None:
    page = render_report(make_report())
    for _, attributes in Outline(page).tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert re.search(r"url\(|@import|https?://", page) is None


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page() -> None:
    page = render_report(make_report())
    policy = next(a["content"] for tag, a in Outline(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


def test_headlines_lead_and_limits_are_stated_before_the_first_section() -> None:
    page = render_report(make_report())
    assert page.index(">80.3%<") < page.index("What this does not show") < page.index('<section id="section-1"')


def test_a_report_without_limits_is_refused() -> None:
    with pytest.raises(ValidationError, match="not_shown"):
        make_report(not_shown=())


def test_everything_from_a_report_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    page = render_report(
        make_report(
            title=evil,
            subtitle=evil,
            lead=evil,
            command=evil,
            not_shown=(evil,),
            headlines=(Headline(label=evil, value=evil, hint=evil),),
            lineage=((evil, evil),),
            sections=(
                Section(
                    title=evil,
                    blocks=(
                        Prose(text=f"`{evil}` **{evil}** {evil}"),
                        Note(title=evil, points=(evil,)),
                        TableBlock(title=evil, caption=evil, columns=(Column(title=evil),), rows=((evil,),)),
                        Examples(
                            title=evil,
                            items=(
                                Example(
                                    text=evil,
                                    marks=(Mark(start=0, end=8, label=f'"{evil}'),),
                                    badges=(evil,),
                                    fields=((evil, evil),),
                                ),
                            ),
                        ),
                        Figures(charts=(Bars(title=evil, caption=evil, bars=(Bar(label=evil, value=1, hint=evil),)),)),
                    ),
                ),
            ),
        )
    )
    assert [tag for tag, _ in Outline(page).tags].count("script") == 1
    assert evil not in page


def test_prose_knows_paragraphs_code_and_strong_and_nothing_else() -> None:
    page = page_of(Prose(text="One `x < 1`.\n\nTwo **bold** *not*."))
    assert "<p>One <code>x &lt; 1</code>.</p>\n<p>Two <strong>bold</strong> *not*.</p>" in page


def test_marked_stretches_of_an_example_are_highlighted_in_place() -> None:
    example = Example(text="aé<b>日本c", marks=(Mark(start=1, end=3, label="peak"), Mark(start=5, end=7)))
    page = page_of(Examples(title="Rows", items=(example,)))
    assert 'a<mark title="peak">é&lt;</mark>b&gt;<mark>日本</mark>c' in page


@pytest.mark.parametrize("marks", [((3, 3),), ((0, 99),), ((2, 4), (3, 5))])
def test_marks_that_do_not_fit_the_text_are_refused(marks: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValidationError, match="fit"):
        Example(text="abcdef", marks=tuple(Mark(start=start, end=end) for start, end in marks))


def test_examples_after_the_first_few_are_folded_away_but_there() -> None:
    items = tuple(Example(text=f"row number {number}") for number in range(5))
    page = page_of(Examples(title="Rows", items=items, unfolded=2))
    assert "<summary>3 more</summary>" in page
    assert page.index("row number 1") < page.index("3 more") < page.index("row number 2")


def test_what_is_empty_says_why() -> None:
    page = page_of(
        Figures(charts=(Bars(title="Rejects", bars=(), why_empty="no row was rejected"),)),
        TableBlock(title="Features", columns=(Column(title="a"),), rows=(), why_empty="nothing is missing"),
        Examples(title="Rows", items=(), why_empty="no row was accepted"),
    )
    for reason in ("no row was rejected", "nothing is missing", "no row was accepted"):
        assert f"Nothing to show because {reason}." in page
    assert "<svg" not in page


def test_cells_are_formatted_by_their_column_and_sorted_by_their_value() -> None:
    table = TableBlock(
        title="t", columns=(Column(title="name"), Column(title="rate", unit="share")), rows=(("a", 0.5), ("b", None))
    )
    page = page_of(table)
    assert '<td class="number" data-key="0.5">50.0%</td>' in page
    assert '<td class="number" data-key="">–</td>' in page
    assert '<td data-key="a">a</td>' in page


def test_a_row_that_does_not_fit_the_columns_is_refused() -> None:
    with pytest.raises(ValidationError, match="2 columns"):
        TableBlock(title="t", columns=(Column(title="a"), Column(title="b")), rows=((1,),))


def test_a_key_planted_anywhere_never_reaches_the_page() -> None:
    key = "sk-planted0123456789abcdef"
    page = render_report(
        make_report(
            lead=f"With {key}.",
            command=f"OPENAI_API_KEY=planted-two pipeline run --api-key planted-three --set a={key}",
            lineage=(("server", "https://me:planted-four@host/v1?sig=planted-five"),),
        )
    )
    assert "planted" not in page
    assert "[redacted]" in page


def test_the_same_report_gives_the_same_bytes() -> None:
    assert render_report(make_report()) == render_report(make_report())


def test_a_report_with_nothing_but_its_limits_renders() -> None:
    page = render_report(make_report(headlines=(), sections=(), lineage=(), lead="", subtitle=""))
    assert "What this does not show" in page
    Outline(page)


def test_a_long_text_keeps_its_column_wide_enough_to_be_read_on_a_phone() -> None:
    table = TableBlock(title="t", columns=(Column(title="a"), Column(title="b")), rows=(("short", "word " * 12),))
    assert re.findall(r"<td( class=\"long\")? data-key=\"(\w+)", page_of(table)) == [
        ("", "short"),
        (' class="long"', "word"),
    ]
