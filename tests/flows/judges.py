"""Judges without a model, behind real HTTP: one that reads the prompts and answers by rule, one that flips a coin.

As a process of its own, for kill tests and for trying a recipe:

    python judges.py rule --latency-ms 20

It prints one line, `listening on http://127.0.0.1:PORT/v1`, and serves until it is killed; `/counts` and `/script` are
those of the fault server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

from headwater.tests.llm.fault_server import Body, FaultServer, Plan

MARK = re.compile(r"<<(.+?)>>")
LAYOUT = frozenset({"a", "an", "and", "the", "of", "to", "in", "for", "on", "is", "it", "i", "me", "my", "or"})
"""Words that any text has: a concept of nothing else is irrelevant to every task."""


def kind_of(body: Body) -> str:
    """What the prompt asks: explain, verify, relevance, detection or fuzzing."""
    prompt = str(body["messages"][-1]["content"])
    if "CONCEPT:" in prompt:
        return "explain"
    if "VERDICT:" in prompt:
        return "relevance" if "for a task" in prompt else "verify"
    return "fuzzing" if "one token is marked" in prompt else "detection"


def by_rule(body: Body) -> str:
    """Takes the marked words that come back for the concept, and tells texts by whether they have one of them."""
    texts = _texts(body)
    marked = [found[1].strip().casefold() if (found := MARK.search(text)) else "" for text in texts]
    if kind_of(body) == "explain":
        words = [word for word, count in Counter(marked).most_common(3) if count > 1 and re.search(r"\w", word)]
        return f"I looked at the marks.\nCONCEPT: {' or '.join(words) or 'unclear'}"
    concept = _concept(body)
    if kind_of(body) == "verify":
        fit = sum(word in concept for word in marked) / len(marked)
        verdict = "yes" if fit > 0.9 else "probably" if fit > 0.6 else "maybe" if fit > 0.3 else "no"
        return f"{fit:.0%} of the marks fit.\n\n**VERDICT: {verdict}**"
    if kind_of(body) == "relevance":
        named = any(word not in LAYOUT and word.isalnum() for word in concept)
        return f"I compared it with the task.\nVERDICT: {'yes' if named else 'no'}"
    if kind_of(body) == "fuzzing":
        return _active([word in concept for word in marked])
    return _active([any(word in text.casefold() for word in concept) for text in texts])


def by_coin(body: Body) -> str:
    """Names and confirms anything, and says of every text at random whether it is active."""
    if kind_of(body) == "explain":
        return "They look alike.\nCONCEPT: heads or tails"
    if kind_of(body) in {"verify", "relevance"}:
        return "It may well be.\nVERDICT: maybe"
    draws = hashlib.sha256(str(body["messages"]).encode()).digest()
    return _active([byte % 2 == 1 for byte, _ in zip(draws, _texts(body), strict=False)])


JUDGES: dict[str, Callable[[Body], str]] = {"rule": by_rule, "coin": by_coin}


def _texts(body: Body) -> list[str]:
    """The numbered, quoted texts of the prompt."""
    return [json.loads(text) for text in re.findall(r"^\d+\. (\".*\")$", body["messages"][-1]["content"], re.MULTILINE)]


def _concept(body: Body) -> list[str]:
    [quoted] = re.findall(r"reacts to this: (\".*\")$", body["messages"][-1]["content"], re.MULTILINE)
    return str(json.loads(quoted)).split(" or ")


def _active(said: Sequence[bool]) -> str:
    listed = ", ".join(str(number) for number, active in enumerate(said, 1) if active)
    return f"I compared {len(said)} texts.\nACTIVE: {listed or 'none'}"


async def _serve(server: FaultServer) -> None:
    await server.start()
    print(f"listening on {server.base_url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that judges features without a model.")
    parser.add_argument("judge", choices=sorted(JUDGES))
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    given = parser.parse_args()
    server = FaultServer(Plan(given.latency_ms / 1000), reply=JUDGES[given.judge], port=given.port)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
