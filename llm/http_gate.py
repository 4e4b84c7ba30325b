"""How many calls a server gets at once, and when it gets none: adaptive concurrency, shared waits, a circuit breaker.

Every call passes the gate. `enter` waits for a permit; the call then tells the gate what came of it (`answered` or
`refused`) and gives the permit back (`leave`).

- *Concurrency.* Starts at `most`. A 429 or 503 halves it, once per round trip however many calls were refused in it;
  every answer raises it a little, so that a full round trip adds `most`/16 and at least one.
- *Retry-After.* Nobody enters before the server's own time is up.
- *Breaker.* After `FAILURES_TO_OPEN` failures in a row nobody enters but one probe at a time, at growing intervals,
  until something is answered.
- *Patience.* When nothing was answered for `patience_s`, those who wait get a TransientError: the run stops with
  everything kept, rather than hang.

One gate belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from headwater.core.errors import ThrottledError, TransientError

FAILURES_TO_OPEN = 8
"""Failures in a row, over all calls, after which the server counts as down."""
FIRST_PROBE_S = 1.0
LAST_PROBE_S = 30.0
"""Seconds between probes: doubling from the first to the last."""
_ROUND_TRIPS_TO_RECOVER = 16

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Permit:
    """The right to make one call."""

    epoch: int
    """How many times concurrency had been cut when the call began."""
    probe: bool


class Gate:
    """See the module's docstring. `server` names the server in messages."""

    def __init__(self, server: str, *, most: int, patience_s: float) -> None:
        self._server = server
        self._most = most
        self._patience_s = patience_s
        self._limit = float(most)
        self._in_flight = 0
        self._epoch = 0
        self._failures = 0
        self._answers = 0
        self._hold_until = 0.0
        self._opened_at: float | None = None
        self._probing = False
        self._probe_s = FIRST_PROBE_S
        self._probe_at = 0.0
        self._stalled_since: float | None = None
        self._trouble: TransientError | None = None
        self._waiting: deque[asyncio.Future[Permit]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def limit(self) -> int:
        """How many calls may be in flight now."""
        return int(self._limit)

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: the server counts as down."""
        return self._opened_at is not None

    @property
    def answers(self) -> int:
        """How many calls the server has answered, by data or by a refusal that is the caller's own fault."""
        return self._answers

    def given_up(self) -> TransientError | None:
        """What to tell a caller once nothing has been answered for as long as patience lasts; None before that."""
        now = self._loop.time()
        # The very sum that the clock is set by: rounded otherwise, it would not be time yet when the clock strikes.
        if self._stalled_since is None or max(now, self._hold_until) < self._stalled_since + self._patience_s:
            return None
        return self._surrender(now, self._stalled_since)

    async def enter(self) -> Permit:
        """Wait for the right to call. Raises TransientError (or ThrottledError) when patience is over."""
        if not self._waiting and self._has_room(self._loop.time()):
            return self._grant()
        turn: asyncio.Future[Permit] = self._loop.create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(turn.result())
            raise

    def leave(self, permit: Permit) -> None:
        """Give the permit back; exactly once per `enter`, whatever happened."""
        self._in_flight -= 1
        if permit.probe:
            self._probing = False
        self._admit()

    def answered(self, permit: Permit) -> None:
        """The server did its work: good data, or a refusal that says something about the request alone.

        Late answers to calls from before the breaker opened don't close it: a server that goes down still sends some.
        """
        self._answers += 1
        self._failures = 0
        self._stalled_since = None
        step = max(1.0, self._most / _ROUND_TRIPS_TO_RECOVER)
        self._limit = min(float(self._most), self._limit + step / max(1.0, self._limit))
        if self._opened_at is not None and permit.probe:
            _log.warning("%s answers again after %.0f s; going on.", self._server, self._loop.time() - self._opened_at)
            self._opened_at = None
            self._probe_s = FIRST_PROBE_S

    def refused(self, permit: Permit, trouble: TransientError) -> None:
        """The server did not do its work, for a reason that may pass."""
        now = self._loop.time()
        self._trouble = trouble
        if self._stalled_since is None:
            self._stalled_since = now
        if isinstance(trouble, ThrottledError):
            self._hold_until = max(self._hold_until, now + (trouble.retry_after or 0.0))
            if permit.epoch == self._epoch:
                self._cut()
                self._failures += 1
        else:
            self._failures += 1
        if self.is_open:
            self._postpone(permit, now)
        elif self._failures >= FAILURES_TO_OPEN:
            self._open(now)

    def _cut(self) -> None:
        self._epoch += 1
        self._limit = max(1.0, min(self._limit, float(self._in_flight)) / 2)
        _log.info("%s asks for patience; at most %d calls in flight now.", self._server, self.limit)

    def _postpone(self, permit: Permit, now: float) -> None:
        if permit.probe:
            self._probe_s = min(2 * self._probe_s, LAST_PROBE_S)
            self._probe_at = now + self._probe_s

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._probe_at = now + self._probe_s
        _log.warning(
            "%s failed %d times in a row; the last time: %s Paused, and asking again now and then for %.0f s. "
            "Nothing is lost.",
            self._server,
            self._failures,
            self._trouble,
            self._patience_s,
        )

    def _has_room(self, now: float) -> bool:
        if now < self._hold_until:
            return False
        if self.is_open:
            return not self._probing and now >= self._probe_at
        return self._in_flight < self.limit

    def _grant(self) -> Permit:
        self._in_flight += 1
        self._probing = self.is_open
        return Permit(self._epoch, self._probing)

    def _admit(self) -> None:
        """Let in whoever may go now, send away everybody when patience is over, else set the clock."""
        now = self._loop.time()
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
            elif self._has_room(now):
                self._waiting.popleft().set_result(self._grant())
            else:
                break
        if self._waiting and (self.is_open or now < self._hold_until) and self.given_up():
            self._send_away()
        self._set_clock(now)

    def _send_away(self) -> None:
        for turn in self._waiting:
            error = self.given_up()
            if error is not None and not turn.done():
                turn.set_exception(error)
        self._waiting.clear()

    def _surrender(self, now: float, since: float) -> TransientError:
        todo = "Run again when it is well; everything finished is kept."
        what = f"{self._server} has answered nothing for {now - since:.0f} s; the last trouble: {self._trouble}"
        asked = self._hold_until - now
        if asked <= 0:
            return TransientError(what, todo=todo)
        what = f"{what} It asks for {asked:.0f} s more, and our patience is {self._patience_s:g} s."
        return ThrottledError(what, todo=todo, retry_after=asked)

    def _set_clock(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        due = [at for at in (self._hold_until, self._probe_at if self.is_open else 0.0) if at > now]
        if self.is_open and self._stalled_since is not None:
            due.append(self._stalled_since + self._patience_s)
        if due:
            self._timer = self._loop.call_at(min(due), self._admit)
