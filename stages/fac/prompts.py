"""The words in which a generator is asked for rows that fire a feature.

Two styles. `list` prefills a numbered list in the assistant's turn and stops at the line's end: a small model continues
a list well where an instruction makes it copy or chatter. `instruct` states the wish in words, for models that follow
them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

Style = Literal["list", "instruct"]
Prompt = list[dict[str, str]]

_SPACES = re.compile(r"\s+")
_EXAMPLE_CHARACTERS = 400


def first_prompt(examples: Sequence[str], explanation: str | None, style: Style, draw: random.Random) -> Prompt:
    """Step one: more texts like `examples`, which fire the feature. The order of the examples is drawn anew."""
    shown = [_one_line(example) for example in examples]
    draw.shuffle(shown)
    if style == "list":
        return _numbered(_list_wish(explanation), shown)
    wish = [_wish(explanation), "Texts that have it:", *_bullets(shown), _REPLY_RULE]
    return [{"role": "user", "content": "\n".join(wish)}]


def second_prompt(
    pair: tuple[str, str | None],
    examples: Sequence[str],
    explanation: str | None,
    style: Style,
    draw: random.Random,
) -> Prompt:
    """Step two: texts that have what the first of the pair has and the second, where there is one, lacks.

    `examples` fill the list around the strong text, which comes last, next to the place where the model goes on.
    """
    good, bad = pair
    strong = _one_line(good)
    shown = [line for line in map(_one_line, examples) if line != strong]
    draw.shuffle(shown)
    if style == "list":
        wish = _list_wish(explanation)
        if bad is not None:
            wish += f" None of them is like this one: {_one_line(bad)}"
        return _numbered(wish, [*shown, strong])
    lines = [_wish(explanation), "A text that has it clearly:", *_bullets([strong])]
    if bad is not None:
        lines += ["A text that tried and lacks it:", *_bullets([_one_line(bad)])]
    lines += ["Write another text that has it as clearly as the first, about something else.", _REPLY_RULE]
    return [{"role": "user", "content": "\n".join(lines)}]


_LIST_WISH = "List different short messages that people might type, all of one sort."
_REPLY_RULE = "Reply with the new text alone, on one line."


def _list_wish(explanation: str | None) -> str:
    return f"{_LIST_WISH} What they share: {explanation}" if explanation else _LIST_WISH


def _wish(explanation: str | None) -> str:
    if explanation:
        return f"Write one new text with this property: {explanation}"
    return "Write one new text that shares what the following texts have in common, in other words."


def _numbered(wish: str, shown: Sequence[str]) -> Prompt:
    lines = [f"{number}. {text}" for number, text in enumerate(shown, 1)]
    return [
        {"role": "user", "content": wish},
        {"role": "assistant", "content": "\n".join([*lines, f"{len(shown) + 1}."])},
    ]


def _bullets(texts: Sequence[str]) -> list[str]:
    return [f"- {text}" for text in texts]


def _one_line(text: str) -> str:
    return _SPACES.sub(" ", text).strip()[:_EXAMPLE_CHARACTERS]
