"""The meter: calls, tokens, seconds and dollars; and the budget that stops a run gracefully."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from headwater.core.errors import Stopped
from headwater.core.settings import Settings

_TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class Reading:
    """What some work used. Readings add up."""

    calls: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0
    """Those of `tokens_in` that came out of a prefix cache."""
    tokens_out: int = 0
    seconds: float = 0.0
    """Seconds of waiting for engines, summed over concurrent calls."""
    dollars: float = 0.0

    def __add__(self, other: Reading) -> Reading:
        return Reading(
            self.calls + other.calls,
            self.tokens_in + other.tokens_in,
            self.tokens_cached + other.tokens_cached,
            self.tokens_out + other.tokens_out,
            self.seconds + other.seconds,
            self.dollars + other.dollars,
        )

    def __sub__(self, other: Reading) -> Reading:
        return self + Reading.from_list([-value for value in other.as_list()])

    @property
    def tokens(self) -> int:
        """In and out."""
        return self.tokens_in + self.tokens_out

    def as_list(self) -> list[float]:
        return [self.calls, self.tokens_in, self.tokens_cached, self.tokens_out, self.seconds, self.dollars]

    @classmethod
    def from_list(cls, values: list[float]) -> Reading:
        calls, tokens_in, cached, out, seconds, dollars = values
        return cls(int(calls), int(tokens_in), int(cached), int(out), seconds, dollars)


class Price(Settings):
    """Dollars per million tokens."""

    input: float = Field(0.0, ge=0)
    cached: float | None = Field(None, ge=0)
    """Price of cached input tokens; the input price when not given."""
    output: float = Field(0.0, ge=0)

    def dollars(self, tokens_in: int, tokens_cached: int, tokens_out: int) -> float:
        cached = self.input if self.cached is None else self.cached
        paid = (tokens_in - tokens_cached) * self.input + tokens_cached * cached + tokens_out * self.output
        return paid / _TOKENS_PER_PRICE


def find_price(prices: Mapping[str, Price], names: Iterable[str]) -> Price | None:
    """The price of a model that has several names: that of the first one with a price."""
    return next((prices[name] for name in names if name in prices), None)


class Meter:
    """Adds up readings from any thread and stops the run once a limit is passed.

    `prices` maps a model name to its price; a model without one costs nothing and is listed in `unpriced`.
    """

    def __init__(
        self,
        prices: Mapping[str, Price] | None = None,
        *,
        max_cost: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._prices = dict(prices or {})
        self._max_cost = max_cost
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._total = Reading()
        self._reserved = Reading()
        self.unpriced: set[str] = set()

    def price(
        self, model: str, tokens_in: int, tokens_cached: int, tokens_out: int, *, names: Iterable[str] = ()
    ) -> float:
        """Dollars of one call to `model`, which a recipe may also call by one of `names`."""
        price = find_price(self._prices, (*names, model))
        if price is None:
            self.unpriced.add(model)
            return 0.0
        return price.dollars(tokens_in, tokens_cached, tokens_out)

    def add(self, reading: Reading) -> None:
        with self._lock:
            self._total += reading

    @property
    def total(self) -> Reading:
        with self._lock:
            return self._total

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self._max_cost is not None or self._max_tokens is not None

    def reserve(self, call: Reading) -> bool:
        """Set aside what a call may use; False, and nothing set aside, when the budget doesn't hold it any more."""
        with self._lock:
            wanted = self._total + self._reserved + call
            if self._max_cost is not None and wanted.dollars > self._max_cost:
                return False
            if self._max_tokens is not None and wanted.tokens > self._max_tokens:
                return False
            self._reserved += call
            return True

    def release(self, call: Reading) -> None:
        """Give back what was set aside: the call has ended, and `add` counts what it used."""
        with self._lock:
            self._reserved -= call

    def check(self) -> None:
        """Raises Stopped when the budget is spent. Called between calls: what is in flight is kept."""
        total = self.total
        if self._max_cost is not None and total.dollars >= self._max_cost:
            raise self.stopped()
        if self._max_tokens is not None and total.tokens >= self._max_tokens:
            raise self.stopped()

    def stopped(self, call: Reading | None = None) -> Stopped:
        """What to raise when the budget is spent, or does not hold a `call` more."""
        total = self.total
        by_tokens = self._max_tokens is not None and (total + (call or Reading())).tokens >= self._max_tokens
        if by_tokens and self._max_tokens is not None:
            spent, option = f"{total.tokens:,} tokens used of at most {self._max_tokens:,}", "--max-tokens"
            more = f", and one more call may use {call.tokens:,}" if call else ""
        else:
            spent, option = f"${total.dollars:.4f} spent of at most ${self._max_cost or 0:.4f}", "--max-cost"
            more = f", and one more call may cost ${call.dollars:.4f}" if call else ""
        return Stopped(
            f"Stopped: {spent}{more}; everything finished is kept.", todo=f"Run again with a higher {option} to go on."
        )
