"""Cleaning text that comes from models and files, so that no writer fails late on it."""

from __future__ import annotations

import re
import unicodedata

_UNSTORABLE = re.compile("[\ud800-\udfff\x00]")
_SPACES = re.compile(r"\s+")
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han put no spaces between words, so each character counts as one."""
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def clean_text(text: str) -> tuple[str, bool]:
    """Replace lone surrogates by U+FFFD and drop NULs: neither can be stored as UTF-8 or in Arrow.

    Returns the text and whether anything was changed, so that the row can be flagged. A surrogate *pair* that stands
    for one character is joined rather than lost.
    """
    if _UNSTORABLE.search(text) is None:
        return text, False
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\x00", ""), True


def normalise(text: str) -> str:
    """NFKC, lower case, single spaces: the form in which two texts are called equal.

    Normalised again after lowering, because a capital may lack the composed form that its small letter has.
    """
    lowered = unicodedata.normalize("NFKC", text).lower()
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", lowered)).strip()


def words(text: str) -> list[str]:
    """The words of the normalised text, punctuation dropped; where a script has no spaces, its characters."""
    return _WORDS.findall(normalise(text))


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """The set of word n-grams of `text`; empty when it has fewer than n words."""
    tokens = words(text)
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
