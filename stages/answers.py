"""What a row was answered while it is still in work: kept, so that no run pays for the same call twice."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from headwater.core.errors import BadOutput
from headwater.core.fingerprint import canonical_json, sha256_text
from headwater.core.journal import Journal
from headwater.core.meter import Reading
from headwater.core.text import clean_text
from headwater.llm.types import ChatRequest, Completion, Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply that was paid for, of use or not."""

    result: Completion | BadOutput
    reading: Reading


class Answers:
    """The answers to one row's calls, those of earlier runs among them.

    One is written to the journal when the row asks on, and not before: a row that asks once costs no writing. What is
    asked again in a later run is recognised by the whole request; equal requests are answered in their order.
    """

    def __init__(self, journal: Journal, row: str) -> None:
        self._journal = journal
        self._row = row
        self._new: list[tuple[str, ChatRequest, Answer]] = []
        self._earlier: defaultdict[str, deque[Answer]] = defaultdict(deque)
        kept = journal.calls(row)
        self._kept = len(kept)
        for call in kept:
            self._earlier[call["request"]].append(_unpacked(call))

    def take(self, engine: str, request: ChatRequest) -> Answer | None:
        """What an earlier run was answered to `request`, if it was and nobody has taken it."""
        if not self._earlier:
            return None
        found = self._earlier.get(_key(engine, request))
        return found.popleft() if found else None

    def add(self, engine: str, request: ChatRequest, answer: Answer) -> None:
        """Hold a new answer until `keep`."""
        self._new.append((engine, request, answer))

    def keep(self) -> None:
        """Write down what is new. When this returns, SIGKILL cannot lose it."""
        if self._new:
            calls = [_packed(_key(engine, request), answer) for engine, request, answer in self._new]
            self._journal.put_calls(self._row, calls, first=self._kept)
            self._kept += len(calls)
            self._new.clear()


def _key(engine: str, request: ChatRequest) -> str:
    messages = [[message.role, message.content] for message in request.messages]
    return sha256_text(canonical_json([engine, request.id, messages, request.sampling.model_dump(), request.seed]))[:24]


def _packed(key: str, answer: Answer) -> dict[str, Any]:
    result = answer.result
    if isinstance(result, Completion):
        said: dict[str, Any] = {"completion": dataclasses.asdict(result)}
    else:
        said = {
            "bad_output": {
                "what": clean_text(result.what)[0],
                "reason": result.reason,
                "raw": clean_text(result.raw)[0],
                "todo": result.todo,
                "tokens": result.tokens,
            }
        }
    return {"request": key, "reading": answer.reading.as_list(), **said}


def _unpacked(call: dict[str, Any]) -> Answer:
    reading = Reading.from_list(call["reading"])
    if "completion" in call:
        fields = call["completion"]
        return Answer(Completion(**{**fields, "usage": Usage(**fields["usage"])}), reading)
    fields = call["bad_output"]
    return Answer(BadOutput(**{**fields, "tokens": tuple(fields["tokens"])}), reading)
