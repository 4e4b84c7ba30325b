"""Errors say what happened and what to do, set the exit code, and survive the way out of a worker process."""

from __future__ import annotations

import pickle

import pytest

from headwater.core.errors import (
    BadOutput,
    ConfigError,
    HeadwaterError,
    PermanentError,
    Stopped,
    ThrottledError,
    TransientError,
)


def test_an_error_reads_as_one_paragraph() -> None:
    assert str(PermanentError("It broke.", todo="Mend it.")) == "It broke. Mend it."
    assert str(PermanentError("It broke.")) == "It broke."


@pytest.mark.parametrize(
    ("error", "code"),
    [(TransientError("a"), 1), (PermanentError("a"), 1), (ConfigError("a"), 2), (Stopped("a"), 130)],
)
def test_the_exit_code_follows_from_the_kind(error: HeadwaterError, code: int) -> None:
    assert error.exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        ThrottledError("Busy.", todo="Wait.", retry_after=2.5),
        BadOutput("Cut.", reason="cut_at_length", raw="the tex", tokens=(5, 1, 7)),
        ConfigError("Bad key.", todo="Drop it."),
    ],
)
def test_an_error_comes_whole_through_pickling(error: HeadwaterError) -> None:
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_throttling_is_transient() -> None:
    assert isinstance(ThrottledError("Busy."), TransientError)
