"""The few errors Headwater raises. Each says what happened and what to do next.

Third-party errors are wrapped into these at the boundary, classified by status and structured code, never by words
in a message.
"""

from __future__ import annotations

from typing import Any


class HeadwaterError(Exception):
    """What happened, and what to do about it.

    The process exits with `exit_code` when this error reaches the command line.
    """

    exit_code = 1

    def __init__(self, what: str, *, todo: str = "") -> None:
        self.what = what
        self.todo = todo
        super().__init__(f"{what} {todo}".strip())

    def __reduce__(self) -> tuple[Any, ...]:
        """Survives pickling, as an error raised in a worker process must; the default would lose the keywords."""
        return _remake, (type(self), str(self), self.__dict__.copy())


class TransientError(HeadwaterError):
    """The same call may well succeed later: a 5xx, a dropped connection, a deadline."""


class ThrottledError(TransientError):
    """The server asked for patience (429 or 503)."""

    def __init__(self, what: str, *, todo: str = "", retry_after: float | None = None) -> None:
        super().__init__(what, todo=todo)
        self.retry_after = retry_after
        """Seconds the server asked us to wait, or None when it did not say."""


class PermanentError(HeadwaterError):
    """Trying again cannot help: a refused key, an unknown model, a stage that rejected too much."""


class BadOutput(HeadwaterError):  # noqa: N818 - the term of the architecture page
    """A reply that is not data: empty, cut at the length limit, error-shaped, unparsable."""

    def __init__(
        self, what: str, *, reason: str, raw: str = "", todo: str = "", tokens: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        super().__init__(what, todo=todo)
        self.reason = reason
        """A reason code in snake_case that goes to the rejects and is counted in the report."""
        self.raw = raw
        """The text as it came, kept in the rejects."""
        self.tokens = tokens
        """Tokens in, those of them that were cached, and tokens out: a cut reply is paid for like a good one."""


class ConfigError(HeadwaterError):
    """Bad usage, a bad recipe or bad input: names the key or row, and what to write instead."""

    exit_code = 2


class Stopped(HeadwaterError):  # noqa: N818 - not a fault: the user or the budget asked for it
    """The user (Ctrl+C, SIGTERM) or the budget stopped the run. Everything finished is kept."""

    exit_code = 130


def _remake(kind: type[HeadwaterError], message: str, fields: dict[str, Any]) -> HeadwaterError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error
