"""The shipped anchor and seed are what their README says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest

import headwater.pipelines
from headwater.core.text import clean_text, ngrams, normalise, words

DATA = Path(headwater.pipelines.__file__).parent / "data"
MAX_SHARED_WORDS = 0.4
"""Jaccard similarity of two rows' word sets above which they would count as near-duplicates."""
MAX_SHARED_TRIGRAMS = 0.5
"""The same over character trigrams, which also catches inflected copies."""

Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    lines = (DATA / name).read_bytes().decode("utf-8", errors="strict").splitlines()
    return [json.loads(line) for line in lines]


def by_kind(rows: Rows) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        texts[row["kind"]].append(row["text"])
    return texts


def jaccard(left: set[str], right: set[str]) -> float:
    return len(left & right) / len(left | right)


def trigrams(text: str) -> set[str]:
    plain = normalise(text)
    return {plain[i : i + 3] for i in range(len(plain) - 2)}


@pytest.fixture(scope="module")
def anchor() -> Rows:
    return read("anchor.jsonl")


@pytest.fixture(scope="module")
def seed() -> Rows:
    return read("seed.jsonl")


def test_rows_have_a_kind_and_a_text_and_nothing_else(anchor: Rows, seed: Rows) -> None:
    for row in anchor + seed:
        assert list(row) == ["kind", "text"]
        assert row["text"] == row["text"].strip()
        assert "\n" not in row["text"]
        assert clean_text(row["text"]) == (row["text"], False)


def test_the_anchor_has_14_requests_of_each_of_24_kinds(anchor: Rows) -> None:
    counts = Counter(row["kind"] for row in anchor)
    assert len(counts) == 24
    assert set(counts.values()) == {14}


def test_the_seed_has_16_requests_of_each_of_a_third_of_the_anchor_kinds(anchor: Rows, seed: Rows) -> None:
    counts = Counter(row["kind"] for row in seed)
    kinds = {row["kind"] for row in anchor}
    assert set(counts) < kinds
    assert len(counts) * 3 == len(kinds)
    assert set(counts.values()) == {16}


def test_no_text_occurs_twice_in_anchor_and_seed_together(anchor: Rows, seed: Rows) -> None:
    texts = Counter(normalise(row["text"]) for row in anchor + seed)
    assert [text for text, count in texts.items() if count > 1] == []


def test_no_two_rows_share_a_run_of_eight_words(anchor: Rows, seed: Rows) -> None:
    seen = Counter(gram for row in anchor + seed for gram in ngrams(row["text"], 8))
    assert len(seen) > 1000
    assert [gram for gram, count in seen.items() if count > 1] == []


def test_no_two_rows_are_near_duplicates(anchor: Rows, seed: Rows) -> None:
    rows = [(row["text"], set(words(row["text"])), trigrams(row["text"])) for row in anchor + seed]
    close = [
        (a, b)
        for (a, a_words, a_grams), (b, b_words, b_grams) in combinations(rows, 2)
        if jaccard(a_words, b_words) > MAX_SHARED_WORDS or jaccard(a_grams, b_grams) > MAX_SHARED_TRIGRAMS
    ]
    assert close == []


def test_every_request_is_short(anchor: Rows, seed: Rows) -> None:
    assert all(6 <= len(row["text"].split()) <= 30 for row in anchor + seed)


@pytest.mark.parametrize("name", ["anchor.jsonl", "seed.jsonl"])
def test_length_in_words_does_not_betray_the_kind(name: str) -> None:
    for kind, texts in by_kind(read(name)).items():
        lengths = [len(text.split()) for text in texts]
        assert 13.5 <= mean(lengths) <= 18.5, kind
        assert min(lengths) <= 9, kind
        assert max(lengths) >= 23, kind


def test_length_in_characters_stays_in_one_band_for_every_kind(anchor: Rows) -> None:
    means = [mean(len(text) for text in texts) for texts in by_kind(anchor).values()]
    assert max(means) / min(means) < 1.5


def test_requests_of_a_kind_are_not_filled_in_templates(anchor: Rows, seed: Rows) -> None:
    for kind, texts in by_kind(anchor + seed).items():
        openings = Counter(tuple(words(text)[:2]) for text in texts)
        assert max(openings.values()) <= 3, kind


def test_any_prefix_is_a_fair_sample_of_the_kinds(anchor: Rows, seed: Rows) -> None:
    assert len({row["kind"] for row in anchor[:24]}) == 24
    assert len({row["kind"] for row in seed[:8]}) == 8
