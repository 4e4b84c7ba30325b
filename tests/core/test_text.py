"""Whatever a model or a file says, what is kept of it can be stored."""

from __future__ import annotations

import re

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.text import clean_text, ngrams, normalise, words

ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""Lone surrogates included."""


@given(ANY_TEXT)
def test_clean_text_can_always_be_encoded_and_stored_in_arrow(text: str) -> None:
    clean, _ = clean_text(text)
    assert pa.array([clean], pa.string()).to_pylist() == [clean]
    assert "\x00" not in clean


@given(ANY_TEXT)
def test_clean_text_says_whether_it_changed_anything_and_has_nothing_to_do_twice(text: str) -> None:
    clean, changed = clean_text(text)
    assert changed == (clean != text)
    assert clean_text(clean) == (clean, False)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")))
def test_storable_text_is_left_alone(text: str) -> None:
    assert clean_text(text) == (text, False)


@given(st.lists(st.one_of(st.text(), st.sampled_from(["\ud83d", "\ude00", "\ud83d\ude00", "\x00"]))))
def test_cleaning_agrees_with_a_regular_expression(pieces: list[str]) -> None:
    text = "".join(pieces)
    pairs = re.compile("[\ud800-\udbff][\udc00-\udfff]")
    joined = pairs.sub(lambda m: chr(0x10000 + ((ord(m[0][0]) - 0xD800) << 10) + ord(m[0][1]) - 0xDC00), text)
    assert clean_text(text)[0] == re.sub("[\ud800-\udfff]", "\ufffd", joined).replace("\x00", "")


def test_a_pair_of_surrogates_is_joined_and_a_lone_one_replaced() -> None:
    assert clean_text("whole \ud83d\ude00, half \ud83d, nul \x00.") == ("whole 😀, half \ufffd, nul .", True)


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_texts_that_differ_in_case_width_and_spaces_are_the_same_text() -> None:
    assert normalise(" Ｆｕｌｌ\n  WIDTH\t① ") == "full width 1"
    assert normalise("H\u0331") == normalise("\u1e96")


def test_ngrams_are_runs_of_words_without_punctuation() -> None:
    assert words("Don't stop, NOW!") == ["don", "t", "stop", "now"]
    assert ngrams("a b, c d", 3) == {("a", "b", "c"), ("b", "c", "d")}
    assert ngrams("a b", 3) == set()


def test_in_a_script_without_spaces_every_character_is_a_word() -> None:
    assert words("我喜欢 tea，谢谢") == ["我", "喜", "欢", "tea", "谢", "谢"]
