"""Near-duplicates against a brute-force comparison of real texts, and the cases a reader would call obvious."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from headwater.core.errors import ConfigError
from headwater.core.text import ngrams
from headwater.stages.curate.near_duplicates import near_duplicates

DATA = Path(__file__).parents[2].parent / "shared" / "data"

STORY = (
    "The ferry leaves the northern harbour at seven in the morning and reaches the island two hours later, unless "
    "the wind turns, in which case the captain waits for the tide and nobody on board gets any breakfast at all."
)


def brute_force(texts: list[str], threshold: float) -> list[int | None]:
    """Every text against every kept one, by the definition and without a hash."""
    kept: dict[int, set[tuple[str, ...]]] = {}
    originals: list[int | None] = []
    for index, text in enumerate(texts):
        own = ngrams(text, 3)
        similar = [(len(own & other) / len(own | other), -earlier) for earlier, other in kept.items()]
        best = max(similar, default=(0.0, 0))
        originals.append(-best[1] if best[0] >= threshold else None)
        if originals[-1] is None:
            kept[index] = own
    return originals


def model_solutions(questions: int) -> list[str]:
    """Four models' answers to each question: real texts, many of them close to one another."""
    path = DATA / "gsm8k_model_solutions.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not here: it lies beside the repository, in ../shared/data")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for _, line in zip(range(questions), lines, strict=False)]
    fields = [
        value["solution"] if isinstance(value, dict) else value
        for value in chain.from_iterable(record.values() for record in records)
        if isinstance(value, dict | str)
    ]
    return [text for text in fields if isinstance(text, str) and len(ngrams(text, 3)) > 0]


@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.8])
def test_real_texts_are_judged_as_by_brute_force(threshold: float) -> None:
    texts = model_solutions(140)
    expected = brute_force(texts, threshold)

    assert len(texts) > 600
    assert sum(original is not None for original in expected) >= 5
    assert near_duplicates(texts, threshold=threshold) == expected


def test_copies_and_light_edits_point_to_the_first() -> None:
    edited = STORY.replace("seven", "eight")
    texts = [
        STORY,
        "Something else entirely, about the price of wool.",
        STORY.upper(),
        edited,
        "A third matter, in short.",
    ]
    assert near_duplicates(texts) == [None, None, 0, 0, None]


def test_numbers_keep_two_problems_apart() -> None:
    texts = [f"Tom has {n} apples and buys {n + 1} more" for n in (2, 5)]
    assert near_duplicates(texts) == [None, None]


def test_a_text_is_not_dropped_for_resembling_a_dropped_one() -> None:
    words = STORY.split()
    chain_of_edits = [" ".join(words[:n]) for n in (len(words), len(words) - 6, len(words) - 12)]
    similarity = [
        len(ngrams(a, 3) & ngrams(b, 3)) / len(ngrams(a, 3) | ngrams(b, 3))
        for a, b in (
            (chain_of_edits[0], chain_of_edits[1]),
            (chain_of_edits[1], chain_of_edits[2]),
            chain_of_edits[::2],
        )
    ]
    assert similarity[0] > 0.8
    assert similarity[1] > 0.8
    assert similarity[2] < 0.8
    assert near_duplicates(chain_of_edits) == [None, 0, None]


def test_the_most_similar_kept_text_is_named() -> None:
    words = STORY.split()
    texts = [STORY, " ".join(words[:-14]), " ".join(words[:-11])]
    assert near_duplicates(texts, threshold=0.7) == [None, None, 1]


def test_short_and_wordless_texts_duplicate_equal_ones_alone() -> None:
    texts = ["Yes.", "yes", "No.", "", "   ", "!!!", "???", "!!!", "yes no"]
    assert near_duplicates(texts) == [None, 0, None, None, 3, None, None, 5, None]


def test_scripts_without_spaces_are_compared_character_by_character() -> None:
    chinese = "渡轮早上七点离开北港两小时后抵达岛屿除非风向改变那样船长会等待潮汐而船上没有人能吃到早餐"
    assert near_duplicates([chinese, chinese.replace("七", "八"), "羊毛的价格今年又涨了许多农民都很高兴"]) == [
        None,
        0,
        None,
    ]


def test_no_texts_have_no_duplicates() -> None:
    assert near_duplicates([]) == []


def test_the_result_is_the_same_every_time_and_under_another_seed() -> None:
    rng = np.random.default_rng(0)
    vocabulary = np.array(STORY.split())
    texts = [" ".join(rng.choice(vocabulary, 12)) for _ in range(200)]
    texts += [text + " indeed" for text in texts[:50]]
    first = near_duplicates(texts)
    assert first[200:] == list(range(50))
    assert near_duplicates(texts) == first == near_duplicates(texts, seed=2)


@pytest.mark.parametrize(("threshold", "n_gram"), [(0.0, 3), (1.2, 3), (0.8, 0)])
def test_senseless_settings_are_refused(threshold: float, n_gram: int) -> None:
    with pytest.raises(ConfigError, match=r"threshold|n_gram"):
        near_duplicates(["a", "b"], threshold=threshold, n_gram=n_gram)
