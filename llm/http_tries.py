"""How long one request is tried, and how long it pauses in between."""

from __future__ import annotations

import asyncio
import random

from headwater.core.errors import BadOutput, HeadwaterError, ThrottledError, TransientError
from headwater.core.seeds import derive_seed
from headwater.llm.http_gate import Gate
from headwater.llm.http_replies import UnreachableError, UnreadableError
from headwater.llm.types import ChatRequest

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 8.0
"""Seconds before a call is repeated: doubling from the first to the last, each time between half and all of it."""


class Tries:
    """How long one request is tried: counts what may be its own fault, and bounds what is the server's."""

    def __init__(self, request: ChatRequest, attempts: int, patience_s: float) -> None:
        self._request = request
        self._attempts = attempts
        self._patience_s = patience_s
        self._failed = 0
        self._pauses = 0
        self._answers_seen: int | None = None
        self._throttled_since: float | None = None

    def pause_after(self, error: TransientError, gate: Gate) -> float:
        """Seconds to wait before the next attempt. Raises what to tell the caller when there is none."""
        given_up = gate.given_up()
        if given_up is not None:
            raise given_up
        if isinstance(error, ThrottledError):
            self._bound_throttling(error)
            if error.retry_after:
                return 0.0  # the gate keeps everybody waiting that long
        elif not self._is_the_servers_fault(error, gate):
            self._failed += 1
            if self._failed >= self._attempts:
                raise self._final(error)
        self._answers_seen = gate.answers
        self._pauses += 1
        return self._backoff()

    def _is_the_servers_fault(self, error: TransientError, gate: Gate) -> bool:
        """A dropped connection is the request's own fault only if others got answers since it failed last."""
        return isinstance(error, UnreachableError) and self._answers_seen in (None, gate.answers)

    def _bound_throttling(self, error: ThrottledError) -> None:
        now = asyncio.get_running_loop().time()
        if self._throttled_since is None:
            self._throttled_since = now
        elif now - self._throttled_since > self._patience_s:
            what = f"{error.what} Request {self._request.id!r} was put off for {self._patience_s:g} s."
            todo = "Lower max_concurrency or run again later; everything finished is kept."
            raise ThrottledError(what, todo=todo, retry_after=error.retry_after)

    def _final(self, error: TransientError) -> HeadwaterError:
        what = f"{error.what} Request {self._request.id!r} failed {self._failed} times."
        if isinstance(error, UnreadableError):
            return BadOutput(what, reason="error_reply", raw=error.raw)
        return TransientError(what, todo="Look at the server's log, then run again; everything finished is kept.")

    def _backoff(self) -> float:
        draw = random.Random(derive_seed(self._request.seed, self._request.id, self._pauses))
        full = min(FIRST_BACKOFF_S * 2.0 ** (self._pauses - 1), LAST_BACKOFF_S)
        return full * draw.uniform(0.5, 1.0)
