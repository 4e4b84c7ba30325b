"""Guess what a person meant when a name is not one of those allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`Did you mean 'x'? ` with a trailing space, or nothing when no allowed word is close."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}? " if close else ""
