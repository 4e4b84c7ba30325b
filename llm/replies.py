"""When a reply of a local model is data, and when it is not."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.errors import BadOutput
from headwater.core.text import clean_text
from headwater.llm.types import ChatRequest, Completion, Usage


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop text in it, and whether there was one."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def judge_reply(request: ChatRequest, text: str, usage: Usage, *, ended: bool) -> Completion | BadOutput:
    """A completion, or why the reply is not data. Either way it says what was used."""
    if not ended:
        return BadOutput(
            f"The reply to {request.id} was cut at {request.sampling.max_tokens} tokens.",
            reason="cut_at_length",
            raw=text,
            todo="Raise max_tokens.",
            tokens=usage.counts,
        )
    if not text.strip():
        what = f"The reply to {request.id} has no text."
        return BadOutput(what, reason="empty_reply", raw=text, tokens=usage.counts)
    cleaned, changed = clean_text(text)
    return Completion(cleaned, usage, changed)
