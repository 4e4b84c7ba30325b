"""Reading a judge's reply: the answer that stands on the agreed line, or BadOutput with a reason; never a guess.

Reasoning, fences, case and Markdown around the answer don't matter. Two different answers do.
"""

from __future__ import annotations

import re
from enum import Enum

from headwater.core.errors import BadOutput

MAX_WORDS = 30
"""Longest explanation of a feature, in words."""


class Label(Enum):
    """How far something holds, strongest first."""

    YES = "yes"
    PROBABLY = "probably"
    MAYBE = "maybe"
    NO = "no"

    @property
    def holds(self) -> bool:
        """At least maybe: what counts as relevant (arXiv 2602.10388, appendix K)."""
        return self is not Label.NO


def parse_explanation(reply: str) -> str | None:
    """The concept in at most MAX_WORDS words; None when the judge can't tell.

    Reasons: unfinished_reasoning, no_answer, conflicting_answers, echoed_template, explanation_too_long.
    """
    concept = _answer(reply, "CONCEPT").strip(_DECORATION)
    if concept.strip(_AROUND_WORDS).casefold() in _CANNOT_TELL:
        return None
    if concept.startswith("<") and concept.endswith(">"):
        raise _bad(reply, "echoed_template", "repeats the prompt's placeholder instead of naming a concept")
    if (n_words := len(concept.split())) > MAX_WORDS:
        raise _bad(reply, "explanation_too_long", f"explains in {n_words} words where {MAX_WORDS} are allowed")
    return concept


def parse_label(reply: str) -> Label:
    """The verdict, which must be one of the four labels and nothing else.

    Reasons: unfinished_reasoning, no_answer, conflicting_answers, unknown_label.
    """
    verdict = _answer(reply, "VERDICT").strip(_AROUND_WORDS).casefold()
    try:
        return Label(verdict)
    except ValueError:
        raise _bad(reply, "unknown_label", f"gives the verdict {verdict[:40]!r}, which is no single label") from None


def parse_active(reply: str, n_texts: int) -> tuple[bool, ...]:
    """For each of the numbered texts whether the judge says that it activates the feature. Shape (n_texts,).

    Reasons: unfinished_reasoning, no_answer, conflicting_answers, unreadable_numbers, number_out_of_range.
    """
    answer = _answer(reply, "ACTIVE").strip(_AROUND_WORDS).casefold()
    if answer == "none":
        return (False,) * n_texts
    if not _NUMBERS.fullmatch(answer):
        raise _bad(reply, "unreadable_numbers", f"lists {answer[:40]!r}, which is neither numbers nor 'none'")
    named = {int(number) for number in re.findall(r"\d+", answer)}
    if outside := sorted(named - set(range(1, n_texts + 1))):
        raise _bad(reply, "number_out_of_range", f"names text {outside[0]} of {n_texts}")
    return tuple(number in named for number in range(1, n_texts + 1))


_DECORATION = " \t*_`\"'“”‘’"
_AROUND_WORDS = _DECORATION + ".,;!()[]{}"
_CANNOT_TELL = {"unclear", "unknown", "none", "n/a", "cannot tell", "can't tell", ""}
_NUMBERS = re.compile(r"(?:texts?\s+)?#?\d{1,6}(?:(?:\s*[,;&]\s*(?:and\s+)?|\s+and\s+|\s+)#?\d{1,6})*", re.ASCII)
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_THOUGHT_ENDS = re.compile(r".*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_THOUGHT_BEGINS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)


def _answer(reply: str, marker: str) -> str:
    """What follows the marker on its line, or the next line that has text where nothing does."""
    lines = _without_thoughts(reply).splitlines()
    line_of_answer = re.compile(rf"[\s>*_#`\-\"'{{(\[]*{marker}[\s*_`\"']*[:=：](.*)", re.IGNORECASE)
    answers = {}
    for number, line in enumerate(lines):
        if found := line_of_answer.fullmatch(line):
            answer = found[1] if found[1].strip(_AROUND_WORDS) else _next_text(lines[number + 1 :])
            answers[answer.strip(_AROUND_WORDS).casefold()] = answer.strip()
    answers.pop("", None)
    if not answers:
        raise _bad(reply, "no_answer", f"has no line '{marker}: …'")
    if len(answers) > 1:
        raise _bad(reply, "conflicting_answers", f"gives {len(answers)} different answers")
    return next(iter(answers.values()))


def _without_thoughts(reply: str) -> str:
    # Templates that open the reasoning inside the prompt leave only its end in the reply.
    visible = _THOUGHT_ENDS.sub("", _THOUGHT.sub("", reply))
    if _THOUGHT_BEGINS.search(visible):
        raise _bad(reply, "unfinished_reasoning", "stops inside its reasoning")
    return visible


def _next_text(lines: list[str]) -> str:
    return next((line for line in lines if line.strip(_AROUND_WORDS)), "")


def _bad(reply: str, reason: str, what: str) -> BadOutput:
    return BadOutput(
        f"The judge's reply {what}.",
        reason=reason,
        raw=reply,
        todo="If this is common, use a stronger judge or allow it more tokens.",
    )
