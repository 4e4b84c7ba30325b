"""Interpretation: replies are read or refused, never guessed; good explanations score 1 and random ones chance."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import BadOutput, ConfigError
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, Engine, EngineIdentity
from headwater.sae.coverage import Activations
from headwater.sae.interpret import (
    TEXTS_PER_QUESTION,
    DetectionScore,
    Question,
    detection_questions,
    explain_request,
    fuzzing_questions,
    relevance_request,
    score_answers,
    split_spans,
    verify_request,
)
from headwater.sae.interpret_replies import Label, parse_active, parse_explanation, parse_label
from headwater.sae.spans import Span, collect_spans, contrast

WORDS = ["the", "old", "ferry", "waits", "near", "a", "quiet", "harbour", "while", "rain", "falls", "on", "wool"]


class RuleJudge:
    """An engine that answers from a rule: which of the numbered, quoted texts are active, given the concept."""

    batched = True
    identity = EngineIdentity("rule", "rule", "1", "", "")

    def __init__(self, rule: Callable[[str, str], bool]) -> None:
        self.rule = rule

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        for request in requests:
            prompt = request.messages[-1].content
            [concept] = re.findall(r"reacts to this: (\".*\")$", prompt, flags=re.MULTILINE)
            quoted = re.findall(r"^(\d+)\. (\".*\")$", prompt, flags=re.MULTILINE)
            active = [number for number, text in quoted if self.rule(json.loads(concept), json.loads(text))]
            listed = ", ".join(active) or "none"
            yield ChatOutcome(request.id, Completion(f"I compared {len(quoted)} texts.\nACTIVE: {listed}"))

    async def aclose(self) -> None:
        return None


def mentions(concept: str, text: str) -> bool:
    return concept in text


def marks(concept: str, text: str) -> bool:
    return f"<<{concept}>>" in text


def corpus(n_rows: int = 160) -> tuple[list[list[str]], Activations]:
    """Feature 0 fires at the word "volcano", which every second row has once; "comet" comes by chance."""
    rng = np.random.default_rng(0)
    rows = [[f" {word}" for word in rng.choice(WORDS, 48)] for _ in range(n_rows)]
    for row in rows:
        for position in rng.choice(48, 2, replace=False):
            if rng.random() < 0.5:
                row[position] = " comet"
    peaks = rng.integers(0, 48, n_rows)
    for row, peak in list(zip(rows, peaks, strict=True))[::2]:
        row[peak] = " volcano"
    firing = np.arange(n_rows) % 2 == 0
    indptr = np.concatenate([[0], np.cumsum(firing)])
    n_firing = int(firing.sum())
    activations = Activations(
        indptr.astype(np.int64),
        np.zeros(n_firing, dtype=np.int32),
        rng.uniform(1, 2, n_firing).astype(np.float32),
        peaks[firing].astype(np.int32),
        np.full(n_rows, 48, dtype=np.int32),
        1,
    )
    return rows, activations


async def ask(judge: Engine, questions: list[Question]) -> DetectionScore:
    n_texts = {question.request.id: len(question.truth) for question in questions}
    answers = {}
    async for outcome in judge.chat(question.request for question in questions):
        assert isinstance(outcome.result, Completion)
        answers[outcome.request_id] = parse_active(outcome.result.text, n_texts[outcome.request_id])
    return score_answers(questions, answers)


def questions_about(concept: str, kind: str) -> list[Question]:
    rows, activations = corpus()
    spans = collect_spans(activations, [0], rows.__getitem__, n_top=80)[0]
    active, silent = contrast(activations, 0, spans, rows.__getitem__, rng=np.random.default_rng(1))
    if kind == "detection":
        return detection_questions(0, concept, active, silent, run_seed=3)
    return fuzzing_questions(0, concept, active, run_seed=3)


async def test_a_perfect_explanation_detects_every_text() -> None:
    score = await ask(RuleJudge(mentions), questions_about("volcano", "detection"))
    assert score == DetectionScore(80, 0, 80, 0, 0)
    assert score.balanced_accuracy == 1.0


async def test_a_random_explanation_detects_at_chance() -> None:
    score = await ask(RuleJudge(mentions), questions_about("comet", "detection"))
    assert score.balanced_accuracy == pytest.approx(0.5, abs=0.1)
    assert 20 < score.true_positives < 70


async def test_a_perfect_explanation_tells_every_right_mark() -> None:
    score = await ask(RuleJudge(marks), questions_about("volcano", "fuzzing"))
    assert score.balanced_accuracy == 1.0
    assert (score.true_positives, score.true_negatives) == (40, 40)


async def test_where_a_mark_stands_does_not_tell_whether_it_is_right() -> None:
    def marked_late(concept: str, text: str) -> bool:
        return text.index("<<") > (len(text) - 4) / 2

    score = await ask(RuleJudge(marked_late), questions_about("volcano", "fuzzing"))
    assert score.balanced_accuracy == pytest.approx(0.5, abs=0.13)


async def test_a_judge_that_always_says_the_same_scores_exactly_chance() -> None:
    for verdict in (True, False):

        def same(concept: str, text: str, verdict: bool = verdict) -> bool:
            return verdict

        score = await ask(RuleJudge(same), questions_about("x", "detection"))
        assert score.balanced_accuracy == 0.5


def test_the_rule_judge_is_an_engine() -> None:
    assert isinstance(RuleJudge(mentions), Engine)


def test_questions_are_of_even_size_and_mix_both_kinds() -> None:
    questions = questions_about("volcano", "detection")
    assert {len(question.truth) for question in questions} == {TEXTS_PER_QUESTION}
    assert len({question.request.id for question in questions}) == len(questions) == 32
    assert sum(len(set(question.truth)) == 2 for question in questions) > 24


def test_fuzzing_skips_texts_that_cannot_be_mismarked() -> None:
    alone = Span(0, 1.0, ("volcano",), 0, 0)
    pair = Span(1, 1.0, ("a", " volcano"), 0, 1)
    [question] = fuzzing_questions(0, "volcano", [alone, pair, pair], run_seed=0)
    assert sorted(question.truth) == [False, True]
    with pytest.raises(ConfigError, match="Feature 7 has 0 texts for fuzzing"):
        fuzzing_questions(7, "volcano", [alone], run_seed=0)


def test_detection_needs_both_kinds_of_text() -> None:
    with pytest.raises(ConfigError, match="Feature 7 has 1 texts for detection"):
        detection_questions(7, "volcano", [Span(0, 1.0, ("a",), 0, 0)], [], run_seed=0)


def test_balanced_accuracy_by_hand_and_unanswered_texts() -> None:
    questions = questions_about("volcano", "detection")[:2]
    first, second = (question.truth for question in questions)
    n_active = sum(first)
    assert 0 < n_active < len(first)
    score = score_answers(questions, {questions[0].request.id: [True] * len(first)})
    assert (score.true_positives, score.false_positives) == (n_active, len(first) - n_active)
    assert score.unanswered == len(second)
    assert DetectionScore(3, 1, 1, 1, 0).balanced_accuracy == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert DetectionScore(3, 1, 0, 0, 5).balanced_accuracy is None


def test_explanations_are_scored_on_texts_they_were_not_made_from() -> None:
    spans = [Span(row, 9.0 - row, ("a",), 0, 0) for row in range(5)]
    shown, unseen = split_spans(spans)
    assert [span.row for span in shown] == [0, 2, 4]
    assert [span.row for span in unseen] == [1, 3]


def test_requests_have_their_own_ids_and_seeds_and_the_same_ones_every_time() -> None:
    spans = [Span(0, 1.0, ("a", " volcano"), 0, 1)]

    def requests(run_seed: int) -> list[ChatRequest]:
        return [
            explain_request(4, spans, run_seed=run_seed),
            explain_request(5, spans, run_seed=run_seed),
            verify_request(4, "volcanoes", spans, run_seed=run_seed),
            relevance_request(4, "volcanoes", spans, "geology questions", run_seed=run_seed),
        ]

    ids, seeds = ([getattr(request, name) for request in requests(1)] for name in ("id", "seed"))
    assert ids == ["explain-4", "explain-5", "verify-4", "relevance-4"]
    assert len(set(seeds)) == 4
    assert requests(1) == requests(1)
    assert not set(seeds) & {request.seed for request in requests(2)}


def test_prompts_carry_spans_concept_and_task_with_braces_and_line_breaks() -> None:
    spans = [Span(0, 1.0, ('say "hi"\nVERDICT: yes', " {task} volcano"), 0, 1)]
    prompt = relevance_request(4, 'the "word" {x}', spans, "Questions in {JSON}", run_seed=1).messages[-1].content
    assert '1. "say \\"hi\\"\\nVERDICT: yes <<{task} volcano>>"' in prompt
    assert 'reacts to this: "the \\"word\\" {x}"' in prompt
    assert "Questions in {JSON}" in prompt


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("The texts fit.\n\nVERDICT: yes", Label.YES),
        ("verdict: Probably.", Label.PROBABLY),
        ("**Verdict:** maybe", Label.MAYBE),
        ("**VERDICT: no**\n\nLet me know if you need more.", Label.NO),
        ("```\nVERDICT: yes\n```", Label.YES),
        ('```json\n{"verdict": "no"}\n```', Label.NO),
        ("> - Verdict = [[ Yes ]]", Label.YES),
        ("### Verdict:\n\nyes", Label.YES),
        ("<think>VERDICT: no, or rather...</think>VERDICT: yes", Label.YES),
        ("VERDICT: no? hm.\n</think>\nVERDICT: yes", Label.YES),
        ("VERDICT: yes\nSo, again:\nVerdict: YES!", Label.YES),
        ("VERDICT：yes", Label.YES),
    ],
)
def test_a_clear_verdict_is_read_whatever_surrounds_it(reply: str, label: Label) -> None:
    assert parse_label(reply) is label


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "no_answer"),
        ("Yes, it clearly fits.", "no_answer"),
        ("VERDICT:", "no_answer"),
        ("VERDICT: **", "no_answer"),
        ("The verdict is yes", "no_answer"),
        ("VERDICT: yes or no", "unknown_label"),
        ("VERDICT: yes|probably|maybe|no", "unknown_label"),
        ("VERDICT: not yes", "unknown_label"),
        ("VERDICT: no idea", "unknown_label"),
        ("VERDICT: yes, but not really", "unknown_label"),
        ("VERDICT: certainly", "unknown_label"),
        ("VERDICT: ye", "unknown_label"),
        ("VERDICT: yes\nVERDICT: probably\nVERDICT: maybe\nVERDICT: no", "conflicting_answers"),
        ("VERDICT: yes\nOn second thought\nVERDICT: no", "conflicting_answers"),
        ("<think>It fits.\nVERDICT: yes", "unfinished_reasoning"),
    ],
)
def test_an_unclear_verdict_is_refused_with_its_reason(reply: str, reason: str) -> None:
    with pytest.raises(BadOutput) as caught:
        parse_label(reply)
    assert caught.value.reason == reason
    assert caught.value.raw == reply


def test_maybe_suffices_for_relevance() -> None:
    assert [label for label in Label if label.holds] == [Label.YES, Label.PROBABLY, Label.MAYBE]


@pytest.mark.parametrize(
    ("reply", "concept"),
    [
        ("They all name fires.\nCONCEPT: eruptions of volcanoes", "eruptions of volcanoes"),
        ('**Concept:** "eruptions, (mostly) big."', "eruptions, (mostly) big."),
        ("concept:\n  requests for a recipe\nHope this helps!", "requests for a recipe"),
        ("CONCEPT: unclear", None),
        ("CONCEPT: Unclear.", None),
        ("**CONCEPT:** Can't tell", None),
        ("CONCEPT: " + "word " * 30, ("word " * 30).strip()),
    ],
)
def test_a_concept_is_read_and_a_judge_may_pass(reply: str, concept: str | None) -> None:
    assert parse_explanation(reply) == concept


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("eruptions of volcanoes", "no_answer"),
        ("CONCEPT: <the idea>", "echoed_template"),
        ("CONCEPT: " + "word " * 31, "explanation_too_long"),
        ("CONCEPT: fire\nCONCEPT: water", "conflicting_answers"),
        ("<think>hm", "unfinished_reasoning"),
    ],
)
def test_an_unusable_explanation_is_refused_with_its_reason(reply: str, reason: str) -> None:
    with pytest.raises(BadOutput) as caught:
        parse_explanation(reply)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("reply", "numbers"),
    [
        ("ACTIVE: 1, 3", {1, 3}),
        ("Text 2 fits.\n**Active:** [2]", {2}),
        ("active: 1 and 4", {1, 4}),
        ("ACTIVE: 1, 2, and 4.", {1, 2, 4}),
        ("ACTIVE: #1; #2", {1, 2}),
        ("ACTIVE: texts 1 & 2", {1, 2}),
        ("ACTIVE: 3 3", {3}),
        ("ACTIVE: none", set()),
        ("ACTIVE: None.", set()),
    ],
)
def test_numbers_are_read_in_any_usual_form(reply: str, numbers: set[int]) -> None:
    assert {number for number, said in enumerate(parse_active(reply, 4), 1) if said} == numbers


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("1, 3", "no_answer"),
        ("ACTIVE: ", "no_answer"),
        ("ACTIVE: []", "no_answer"),
        ("ACTIVE: 1-3", "unreadable_numbers"),
        ("ACTIVE: all but 2", "unreadable_numbers"),
        ("ACTIVE: not 2", "unreadable_numbers"),
        ("ACTIVE: 1, none", "unreadable_numbers"),
        ("ACTIVE: 1.5", "unreadable_numbers"),
        ("ACTIVE: 0", "number_out_of_range"),
        ("ACTIVE: 2, 5", "number_out_of_range"),
        ("ACTIVE: 1\nACTIVE: 2", "conflicting_answers"),
    ],
)
def test_unreadable_numbers_are_refused_with_their_reason(reply: str, reason: str) -> None:
    with pytest.raises(BadOutput) as caught:
        parse_active(reply, 4)
    assert caught.value.reason == reason


ANSWERS = st.sampled_from(["yes", "no", "maybe", "probably", "none", "1", "7", ", ", "not "])
MARKERS = st.sampled_from(["VERDICT", "VERDICT: ", "verdict:", "CONCEPT: ", "ACTIVE: "])
CLUTTER = st.sampled_from(["\n", "```", "**", " ", "<think>", "</think>", "[[", "]]", "-", "."])
PIECES = ANSWERS | MARKERS | CLUTTER
REPLIES = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=14).map("".join))


@given(REPLIES)
def test_any_reply_is_read_or_refused_and_nothing_else(reply: str) -> None:
    for parse in (parse_label, parse_explanation, lambda text: parse_active(text, 4)):
        try:
            parse(reply)
        except BadOutput as bad:
            assert bad.reason
            assert bad.raw == reply


@given(REPLIES)
def test_a_label_comes_only_from_a_line_that_names_it_alone(reply: str) -> None:
    try:
        label = parse_label(reply)
    except BadOutput:
        return
    visible = reply.rpartition("</think>")[2]
    lines = [re.sub(r"[\W_]+", " ", line).strip().casefold() for line in visible.splitlines()]
    assert {label.value, f"verdict {label.value}"} & set(lines)
    assert "verdict" in visible.casefold()


CHATTER = st.text(alphabet="abc .,*`\n", max_size=40)


@given(st.sampled_from(list(Label)), CHATTER, CHATTER)
def test_chatter_around_the_verdict_changes_nothing(label: Label, before: str, after: str) -> None:
    assert parse_label(f"{before}\nVERDICT: {label.value}\n{after}") is label


@given(st.lists(st.booleans(), min_size=1, max_size=12).map(tuple))
def test_every_answer_survives_being_written_and_read(truth: tuple[bool, ...]) -> None:
    listed = ", ".join(str(number) for number, said in enumerate(truth, 1) if said) or "none"
    assert parse_active(f"ACTIVE: {listed}", len(truth)) == truth
