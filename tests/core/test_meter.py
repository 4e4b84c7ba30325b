"""Dollars computed by hand, readings that add up, and a budget that stops between calls."""

from __future__ import annotations

import threading

import pytest

from headwater.core.errors import Stopped
from headwater.core.meter import Meter, Price, Reading

PRICE = Price(input=2.0, cached=0.5, output=8.0)


def test_dollars_by_hand() -> None:
    """600 fresh at $2, 400 cached at $0.50 and 100 out at $8 per million: 0.0012 + 0.0002 + 0.0008."""
    assert PRICE.dollars(1_000, 400, 100) == pytest.approx(0.0022, abs=1e-12)


def test_cached_tokens_cost_the_full_price_unless_told_otherwise_and_may_be_free() -> None:
    assert Price(input=2.0, output=8.0).dollars(1_000, 400, 100) == pytest.approx(0.0028, abs=1e-12)
    assert Price(input=2.0, cached=0.0).dollars(1_000, 400, 100) == pytest.approx(0.0012, abs=1e-12)


def test_readings_add_up_field_by_field_and_survive_as_a_list() -> None:
    total = Reading(1, 10, 4, 3, 0.5, 0.25) + Reading(2, 20, 0, 7, 1.0, 0.5)
    assert total == Reading(3, 30, 4, 10, 1.5, 0.75)
    assert Reading.from_list(total.as_list()) == total


def test_a_model_without_a_price_is_free_and_listed() -> None:
    meter = Meter({"known": PRICE})
    assert meter.price("known", 1_000_000, 0, 0) == 2.0
    assert meter.price("other", 1_000_000, 0, 0) == 0.0
    assert meter.unpriced == {"other"}


def test_a_price_stands_under_any_name_of_the_model() -> None:
    meter = Meter({"/models/mine": PRICE})
    assert meter.price("mine", 1_000_000, 0, 0, names=("/models/mine", "mine")) == 2.0
    assert not meter.unpriced


def test_the_meter_counts_right_from_many_threads() -> None:
    meter = Meter()

    def add() -> None:
        for _ in range(2_000):
            meter.add(Reading(calls=1, tokens_out=3))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (meter.total.calls, meter.total.tokens_out) == (8_000, 24_000)


def test_the_budget_in_dollars_stops_when_it_is_spent_and_not_before() -> None:
    meter = Meter(max_cost=0.01)
    meter.add(Reading(dollars=0.0099))
    meter.check()
    meter.add(Reading(dollars=0.0001))
    with pytest.raises(Stopped, match="--max-cost"):
        meter.check()


def test_the_budget_in_tokens_counts_both_directions() -> None:
    meter = Meter(max_tokens=100)
    meter.add(Reading(tokens_in=60, tokens_out=39))
    meter.check()
    meter.add(Reading(tokens_out=1))
    with pytest.raises(Stopped, match="100 tokens used of at most 100"):
        meter.check()


def test_what_is_set_aside_counts_until_it_is_given_back() -> None:
    meter, call = Meter(max_cost=1.0), Reading(dollars=0.4)
    assert meter.reserve(call) and meter.reserve(call)
    assert not meter.reserve(call)
    meter.release(call)
    meter.add(Reading(dollars=0.1))
    assert meter.reserve(call)
    assert not meter.reserve(Reading(dollars=0.2))


def test_a_budget_that_holds_no_further_call_says_which_one_is_spent() -> None:
    meter = Meter(max_cost=1.0, max_tokens=1_000)
    meter.add(Reading(tokens_in=900, dollars=0.2))
    assert "900 tokens used of at most 1,000, and one more call may use 150" in str(
        meter.stopped(Reading(tokens_out=150, dollars=0.1)).what
    )
    assert "$0.2000 spent of at most $1.0000, and one more call may cost $0.9000" in str(
        meter.stopped(Reading(tokens_out=50, dollars=0.9)).what
    )
