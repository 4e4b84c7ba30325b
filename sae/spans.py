"""The texts that fire a feature, cut to spans that end at the peak token, and spans that don't fire it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import ConfigError
from headwater.sae.coverage import Activations
from headwater.sae.coverage_table import entry_blocks

SPAN_TOKENS = 32
"""Most tokens in a span, the peak among them."""

TokenTexts = Callable[[int], Sequence[str]]
"""The own tokens of a row as texts that join to the row's text."""


@dataclass(frozen=True, slots=True)
class Span:
    """Up to SPAN_TOKENS tokens of a row."""

    row: int
    value: float
    """Activation at the peak; 0 for a span that doesn't fire the feature."""
    tokens: tuple[str, ...]
    start: int
    """Where the first token stands among the row's own tokens."""
    peak: int
    """Index in `tokens` of the peak; in a span that doesn't fire the feature, of the last token."""

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def marked(self) -> str:
        """The text with << >> around the peak."""
        return self.mark(self.peak)

    def mark(self, index: int) -> str:
        """The text with << >> around one token, and such signs of the text itself pulled apart.

        The marker leaves out the spaces around a word. A token without text of its own is a later byte of the
        character before it, so the mark moves there.
        """
        while index > 0 and not self.tokens[index]:
            index -= 1
        token = self.tokens[index]
        core = token.strip() or token
        lead, tail = token[: token.index(core)], token[token.index(core) + len(core) :]
        before = _without_markers("".join(self.tokens[:index]) + lead)
        after = _without_markers(tail + "".join(self.tokens[index + 1 :]))
        # A bracket beside a marker would blur where it begins.
        before += " " if before.endswith("<") else ""
        after = f" {after}" if after.startswith(">") else after
        return f"{before}<<{_without_markers(core)}>>{after}"

    def marked_elsewhere(self, rng: np.random.Generator) -> str | None:
        """The text with << >> around a random token that isn't the peak and reads differently; None without one."""
        peak = self.tokens[self.peak].strip().casefold()
        others = [
            index for index, token in enumerate(self.tokens) if token.strip() and token.strip().casefold() != peak
        ]
        return self.mark(int(rng.choice(others))) if others else None


def collect_spans(
    activations: Activations,
    features: Sequence[int] | NDArray[np.int32],
    token_texts: TokenTexts,
    *,
    delta: float = 0.0,
    n_top: int = 10,
    n_quantile: int = 0,
) -> dict[int, list[Span]]:
    """For each feature the spans of its `n_top` strongest rows, then `n_quantile` from the rest, strongest first.

    The rest (rows that fire the feature above δ) is sampled at even steps of activation rank, from just below the top
    down to the weakest: explanations from the top alone overstate how narrow a feature is. A row gives one span per
    feature. A feature that no row fires gets an empty list. Ties go to the earlier row.
    """
    order, bounds = _strongest_first(activations, features, delta)
    spans = {}
    for number, feature in enumerate(features):
        entries = order[bounds[number] : bounds[number + 1]]
        chosen = np.concatenate([entries[:n_top], _even_steps(entries[n_top:], n_quantile)])
        spans[int(feature)] = [_span_of_entry(activations, int(entry), token_texts) for entry in chosen]
    return spans


def contrast(
    activations: Activations, feature: int, spans: Sequence[Span], token_texts: TokenTexts, *, rng: np.random.Generator
) -> tuple[list[Span], list[Span]]:
    """Active and silent texts to score an explanation with, that differ in nothing but the feature.

    The active ones are `spans`, moved; the silent ones are as many, or as there are silent rows.
    """
    active = [moved(span, token_texts, rng) for span in spans]
    return active, silent_spans(activations, feature, token_texts, like=active, n=len(active), rng=rng)


def moved(span: Span, token_texts: TokenTexts, rng: np.random.Generator) -> Span:
    """The same peak in a window of up to SPAN_TOKENS tokens that begins at a random token at or before it.

    Spans end with the peak, so where a mark stands would tell whether it is the right one; here it doesn't.
    """
    tokens = token_texts(span.row)
    peak = span.start + span.peak
    start = int(rng.integers(max(0, peak + 1 - SPAN_TOKENS), min(peak, max(0, len(tokens) - SPAN_TOKENS)) + 1))
    return replace(span, tokens=tuple(tokens[start : start + SPAN_TOKENS]), start=start, peak=peak - start)


def silent_spans(
    activations: Activations,
    feature: int,
    token_texts: TokenTexts,
    *,
    like: Sequence[Span],
    n: int,
    rng: np.random.Generator,
) -> list[Span]:
    """`n` spans, of different rows, from rows in which the feature is nowhere active, not even below δ.

    Each is as long as some span of `like` and ends anywhere in its row, so that neither its length nor a sentence cut
    short gives it away. Fewer come back when fewer rows are silent.
    """
    active = activations.rows_of(np.flatnonzero(activations.features == feature))
    silent = np.setdiff1d(np.flatnonzero(activations.n_tokens > 0), active)
    rows = rng.permutation(silent)[:n]
    lengths = rng.choice([len(span.tokens) for span in like], len(rows)) if like else np.zeros(0, dtype=np.int64)
    return [_random_window(int(row), int(length), token_texts, rng) for row, length in zip(rows, lengths, strict=True)]


_DOUBLED = re.compile(r"<(?=<)|>(?=>)")


def _without_markers(text: str) -> str:
    return _DOUBLED.sub(r"\g<0> ", text)


def _strongest_first(
    activations: Activations, features: Sequence[int] | NDArray[np.int32], delta: float
) -> tuple[NDArray[np.int64], list[int]]:
    """Entries of these features above δ, grouped in the features' order, and where each group begins."""
    place = np.full(activations.width, -1, dtype=np.int64)
    place[np.asarray(features, dtype=np.int64)] = np.arange(len(features))
    kept = [np.zeros(0, dtype=np.int64)]
    for block in entry_blocks(activations.n_entries):
        wanted = (place[activations.features[block]] >= 0) & (activations.values[block] > delta)
        kept.append(np.flatnonzero(wanted) + block.start)
    entries = np.concatenate(kept)
    group = place[activations.features[entries]]
    order = np.lexsort((entries, -activations.values[entries], group))
    return entries[order], np.searchsorted(group[order], np.arange(len(features) + 1)).tolist()


def _even_steps(entries: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    if len(entries) <= n:
        return entries
    return entries[np.linspace(0, len(entries) - 1, n).round().astype(np.int64)]


def _span_of_entry(activations: Activations, entry: int, token_texts: TokenTexts) -> Span:
    row, peak = int(activations.rows_of(np.array([entry]))[0]), int(activations.positions[entry])
    tokens = token_texts(row)
    if peak >= len(tokens):
        raise ConfigError(
            f"Row {row} has {len(tokens)} tokens, but feature {activations.features[entry]} peaks at token {peak}.",
            todo="Cut the texts with the tokenizer and the length limit that extracted the features.",
        )
    start = max(0, peak + 1 - SPAN_TOKENS)
    return Span(row, float(activations.values[entry]), tuple(tokens[start : peak + 1]), start, peak - start)


def _random_window(row: int, length: int, token_texts: TokenTexts, rng: np.random.Generator) -> Span:
    tokens = token_texts(row)
    start = int(rng.integers(0, max(0, len(tokens) - length) + 1))
    window = tuple(tokens[start : start + length])
    return Span(row, 0.0, window, start, len(window) - 1)
