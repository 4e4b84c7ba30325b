"""Asking a language model what a feature means, whether that is so, whether a task needs it, and how well it predicts.

Explain, verify and task relevance follow the chain of arXiv 2602.10388 (appendix K). Detection and fuzzing score an
explanation by what it predicts (arXiv 2410.13928). The requests go to any engine; `interpret_replies` reads the
answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.core.errors import ConfigError
from headwater.core.seeds import derive_seed
from headwater.llm.types import ChatRequest, Message, Sampling
from headwater.sae.interpret_replies import MAX_WORDS
from headwater.sae.spans import Span

JUDGE_SAMPLING = Sampling(temperature=0, top_p=1, max_tokens=512)
"""Greedy, with room for a few sentences of reasoning before the answer."""

TEXTS_PER_QUESTION = 5


def explain_request(
    feature: int, spans: Sequence[Span], *, run_seed: int, sampling: Sampling = JUDGE_SAMPLING
) -> ChatRequest:
    """What do these spans share? Read the reply with `parse_explanation`."""
    return _request("explain", feature, _EXPLAIN.format(texts=_numbered_marked(spans)), run_seed, sampling)


def verify_request(
    feature: int, explanation: str, spans: Sequence[Span], *, run_seed: int, sampling: Sampling = JUDGE_SAMPLING
) -> ChatRequest:
    """Do the spans fit the explanation? Read the reply with `parse_label`. In a chat that never saw the explaining."""
    prompt = _VERIFY.format(concept=json.dumps(explanation, ensure_ascii=False), texts=_numbered_marked(spans))
    return _request("verify", feature, prompt, run_seed, sampling)


def relevance_request(
    feature: int,
    explanation: str,
    spans: Sequence[Span],
    task: str,
    *,
    run_seed: int,
    sampling: Sampling = JUDGE_SAMPLING,
) -> ChatRequest:
    """Does the task need the concept? Read the reply with `parse_label`; the feature is relevant if it `holds`."""
    prompt = _RELEVANCE.format(
        concept=json.dumps(explanation, ensure_ascii=False), texts=_numbered_marked(spans), task=task.strip()
    )
    return _request("relevance", feature, prompt, run_seed, sampling)


@dataclass(frozen=True, slots=True)
class Question:
    """A request that shows numbered texts, and which of them are active. Read the reply with `parse_active`."""

    request: ChatRequest
    truth: tuple[bool, ...]


def split_spans(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Spans to explain from and spans to score with, both strong and weak: an explanation is scored on unseen texts.

    The strongest goes to the first half. With a single span the second half is empty, and no score is possible.
    """
    return list(spans[::2]), list(spans[1::2])


def detection_questions(
    feature: int,
    explanation: str,
    active: Sequence[Span],
    silent: Sequence[Span],
    *,
    run_seed: int,
    sampling: Sampling = JUDGE_SAMPLING,
) -> list[Question]:
    """Given the explanation, which texts activate the feature? Texts unmarked, shuffled, TEXTS_PER_QUESTION each.

    Take the spans from `spans.contrast`, which keeps their shape from telling. Raises ConfigError unless there are
    active and silent spans.
    """
    texts = [(span.text, True) for span in active] + [(span.text, False) for span in silent]
    return _questions("detection", feature, texts, _DETECT, explanation, run_seed=run_seed, sampling=sampling)


def fuzzing_questions(
    feature: int,
    explanation: str,
    active: Sequence[Span],
    *,
    run_seed: int,
    sampling: Sampling = JUDGE_SAMPLING,
) -> list[Question]:
    """Given the explanation, in which texts is the marked token the activating one?

    Take the spans from `spans.contrast`. Every other text has a random token marked instead of its peak. That token
    may be active too, only less, so a perfect explanation can stay below 1. Raises ConfigError unless two spans have a
    token to mismark.
    """
    rng = np.random.default_rng(derive_seed(run_seed, "fuzzing-marks", feature))
    texts: list[tuple[str, bool]] = []
    for index in rng.permutation(len(active)):
        span, rightly = active[index], len(texts) % 2 == 0
        # A text that can't be mismarked may not be marked rightly either, or its shortness would tell.
        elsewhere = span.marked_elsewhere(rng)
        if elsewhere is not None:
            texts.append((span.marked, True) if rightly else (elsewhere, False))
    return _questions("fuzzing", feature, texts, _FUZZ, explanation, run_seed=run_seed, sampling=sampling)


@dataclass(frozen=True, slots=True)
class DetectionScore:
    """How an explanation predicts activity, over the texts of all answered questions."""

    true_positives: int
    false_negatives: int
    true_negatives: int
    false_positives: int
    unanswered: int
    """Texts whose question got no usable reply; they count neither way."""

    @property
    def answered(self) -> int:
        """Texts whose question got a usable reply."""
        return self.true_positives + self.false_negatives + self.true_negatives + self.false_positives

    @property
    def balanced_accuracy(self) -> float | None:
        """Mean of the accuracy on active and on silent texts: 0.5 is chance; None unless both kinds were answered."""
        active = self.true_positives + self.false_negatives
        silent = self.true_negatives + self.false_positives
        if not active or not silent:
            return None
        return (self.true_positives / active + self.true_negatives / silent) / 2


def score_answers(questions: Sequence[Question], answers: Mapping[str, Sequence[bool]]) -> DetectionScore:
    """Compare with the truth; `answers` maps a request's id to `parse_active`'s result and lacks the unusable ones."""
    counts = {(truth, said): 0 for truth in (True, False) for said in (True, False)}
    unanswered = 0
    for question in questions:
        answer = answers.get(question.request.id)
        if answer is None:
            unanswered += len(question.truth)
            continue
        for pair in zip(question.truth, answer, strict=True):
            counts[pair] += 1
    return DetectionScore(
        true_positives=counts[True, True],
        false_negatives=counts[True, False],
        true_negatives=counts[False, False],
        false_positives=counts[False, True],
        unanswered=unanswered,
    )


def _request(kind: str, name: str | int, prompt: str, run_seed: int, sampling: Sampling) -> ChatRequest:
    return ChatRequest(
        id=f"{kind}-{name}",
        messages=(Message("user", prompt),),
        sampling=sampling,
        seed=derive_seed(run_seed, kind, name),
    )


def _questions(
    kind: str,
    feature: int,
    texts: list[tuple[str, bool]],
    prompt: str,
    explanation: str,
    *,
    run_seed: int,
    sampling: Sampling,
) -> list[Question]:
    if {truth for _, truth in texts} != {True, False}:
        raise ConfigError(
            f"Feature {feature} has {len(texts)} texts for {kind}, not both active and inactive ones.",
            todo="Score features that fire in more rows, or more spans of each.",
        )
    order = np.random.default_rng(derive_seed(run_seed, kind, feature)).permutation(len(texts))
    # Parts of nearly equal size: a question with a single text left over would be another task.
    parts = np.array_split(order, -(-len(texts) // TEXTS_PER_QUESTION))
    questions = []
    for number, part in enumerate(parts):
        shown = [texts[index] for index in part]
        filled = prompt.format(
            concept=json.dumps(explanation, ensure_ascii=False), texts=_numbered([text for text, _ in shown])
        )
        request = _request(kind, f"{feature}-{number}", filled, run_seed, sampling)
        questions.append(Question(request, tuple(truth for _, truth in shown)))
    return questions


def _numbered_marked(spans: Sequence[Span]) -> str:
    return _numbered([span.marked for span in spans])


def _numbered(texts: Sequence[str]) -> str:
    """One text a line, quoted as JSON, so that a text's own line breaks can't pass for the prompt's."""
    return "\n".join(f"{number}. {json.dumps(text, ensure_ascii=False)}" for number, text in enumerate(texts, 1))


_SETTING = (
    "Inside a language model, a detector watches how the model reads text. It reacts to one kind of content, and most "
    "strongly at a single token. "
)

_LABELS = """Think it over in two or three sentences first. Then write your verdict on a last line of its own, with \
one of the four words and nothing else:

VERDICT: yes
VERDICT: probably
VERDICT: maybe
VERDICT: no"""

_EXPLAIN = (
    _SETTING
    + f"""Each text below made it react; the token where it reacted most is marked <<like this>>, and the text is cut \
right after it.

{{texts}}

What does the detector react to? Look at the marked tokens and at the words that lead up to them. It may be a subject, \
a kind of request, a tone, a piece of grammar or one particular word. Take the most specific idea that still fits \
nearly all the texts. First note in a few sentences what they share. Then give the idea on a last line of its own, in \
at most {MAX_WORDS} words:

CONCEPT: <the idea>

If the texts share nothing that you can name, let that line be:

CONCEPT: unclear"""
)

_VERIFY = (
    _SETTING
    + """Somebody claims that it reacts to this: {concept}

These texts made it react, most of all at the token marked <<like this>>:

{texts}

Does the claim fit the texts? yes: it fits all or nearly all of them. probably: it fits most. maybe: it fits some, or \
only loosely. no: it fits few or none.

"""
    + _LABELS
)

_RELEVANCE = (
    _SETTING
    + """It reacts to this: {concept}

Texts that made it react, most of all at the token marked <<like this>>:

{texts}

We collect training examples for a task:

{task}

Should examples for this task contain what the detector reacts to? yes: it belongs to the core of the task. probably: \
many good examples would have it. maybe: some would. no: it has nothing to do with the task, or it is only a matter \
of spelling, layout or grammar that any text has.

"""
    + _LABELS
)

_ACTIVE = """Compare each text with the description in a few words first. Then list the numbers on a last line of its \
own, separated by commas, for example:

ACTIVE: 2, 3

If there is none, let that line be:

ACTIVE: none"""

_DETECT = (
    _SETTING
    + """It reacts to this: {concept}

{texts}

Which of these texts make the detector react? There may be any number of them, even none or all.

"""
    + _ACTIVE
)

_FUZZ = (
    _SETTING
    + """It reacts to this: {concept}

In each text below one token is marked <<like this>>. In some of them the mark stands where the detector reacts, in \
the others it was put somewhere else.

{texts}

In which of these texts is the marked token the one that the detector reacts to? There may be any number of them, even \
none or all.

"""
    + _ACTIVE
)
