"""The gate alone: how concurrency falls and rises, who waits, when the breaker opens and patience ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.core.errors import ThrottledError, TransientError
from headwater.llm import http_gate
from headwater.llm.http_gate import FAILURES_TO_OPEN, Gate, Permit

BUSY = ThrottledError("busy")
DOWN = TransientError("down")


@pytest.fixture(autouse=True)
async def clock_that_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while everybody waits, and then at once: a slow machine changes nothing of what is measured."""
    loop: Any = asyncio.get_running_loop()
    look, now = loop._selector.select, loop.time()

    def leap(timeout: float | None = None) -> Any:
        nonlocal now
        found = look(timeout if timeout is None else 0)
        now += 0.0 if found else timeout or 0.0
        return found

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", leap)


def gate(most: int = 64, patience_s: float = 60.0) -> Gate:
    return Gate("server:1", most=most, patience_s=patience_s)


async def permits(gate: Gate, count: int) -> list[Permit]:
    return [await gate.enter() for _ in range(count)]


async def is_let_in(gate: Gate, within_s: float = 0.02) -> bool:
    try:
        gate.leave(await asyncio.wait_for(gate.enter(), within_s))
    except TimeoutError:
        return False
    return True


async def open_breaker(gate: Gate) -> None:
    for permit in await permits(gate, FAILURES_TO_OPEN):
        gate.refused(permit, DOWN)
        gate.leave(permit)
    assert gate.is_open


async def test_no_more_than_most_are_in_flight() -> None:
    it = gate(most=3)
    held = await permits(it, 3)
    assert not await is_let_in(it)
    it.leave(held[0])
    assert await is_let_in(it)


async def test_those_who_wait_enter_in_order() -> None:
    it = gate(most=1)
    (held,) = await permits(it, 1)
    order: list[int] = []

    async def go(number: int) -> None:
        permit = await it.enter()
        order.append(number)
        it.leave(permit)

    tasks = [asyncio.create_task(go(number)) for number in range(5)]
    await asyncio.sleep(0)
    it.leave(held)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_refusals_of_one_round_trip_halve_concurrency_once() -> None:
    it = gate(most=64)
    for permit in await permits(it, 64):
        it.refused(permit, BUSY)
    assert it.limit == 32


async def test_every_further_round_trip_halves_again_down_to_one() -> None:
    it = gate(most=8)
    seen = []
    for _ in range(5):
        held = await permits(it, it.limit)
        for permit in held:
            it.refused(permit, BUSY)
        for permit in held:
            it.leave(permit)
        seen.append(it.limit)
    assert seen == [4, 2, 1, 1, 1]


async def test_answers_raise_concurrency_by_a_sixteenth_of_the_most_per_round_trip() -> None:
    it = gate(most=64)
    (permit, *_) = await permits(it, 64)
    it.refused(permit, BUSY)
    assert it.limit == 32
    for _ in range(32):
        it.answered(permit)
    assert it.limit == pytest.approx(36, abs=1)
    for _ in range(64 * 16):
        it.answered(permit)
    assert it.limit == 64


async def test_nobody_enters_before_retry_after_is_over_and_then_everybody_may() -> None:
    it = gate(most=8)
    (permit,) = await permits(it, 1)
    clock = asyncio.get_running_loop().time
    began = clock()
    it.refused(permit, ThrottledError("busy", retry_after=0.15))
    it.leave(permit)

    async def pass_through() -> float:
        it.leave(await it.enter())
        return clock() - began

    waited = await asyncio.gather(*(pass_through() for _ in range(5)))
    assert waited == pytest.approx([0.15] * 5)


async def test_a_shorter_retry_after_does_not_shorten_a_longer_one() -> None:
    it = gate(most=8)
    first, second = await permits(it, 2)
    it.refused(first, ThrottledError("busy", retry_after=5))
    it.refused(second, ThrottledError("busy", retry_after=0.01))
    it.leave(first)
    it.leave(second)
    assert not await is_let_in(it, 0.05)


async def test_the_breaker_opens_after_failures_in_a_row_and_not_before() -> None:
    it = gate()
    for permit in await permits(it, FAILURES_TO_OPEN - 1):
        it.refused(permit, DOWN)
        it.leave(permit)
    it.answered(permit)
    for permit in await permits(it, FAILURES_TO_OPEN - 1):
        it.refused(permit, DOWN)
        it.leave(permit)
    assert not it.is_open
    (permit,) = await permits(it, 1)
    it.refused(permit, DOWN)
    assert it.is_open


async def test_an_open_breaker_lets_one_probe_through_and_closes_on_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gate, "FIRST_PROBE_S", 0.05)
    it = gate()
    await open_breaker(it)
    assert not await is_let_in(it, 0.01)
    probe = await asyncio.wait_for(it.enter(), 1)
    assert probe.probe
    assert not await is_let_in(it, 0.1)
    it.answered(probe)
    assert not it.is_open
    it.leave(probe)
    assert not (await it.enter()).probe


async def test_a_late_answer_to_an_older_call_does_not_close_the_breaker() -> None:
    it = gate()
    (older,) = await permits(it, 1)
    await open_breaker(it)
    it.answered(older)
    assert it.is_open


async def test_a_failed_probe_doubles_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gate, "FIRST_PROBE_S", 0.05)
    it = gate()
    await open_breaker(it)
    clock = asyncio.get_running_loop().time
    gaps = []
    for _ in range(3):
        began = clock()
        probe = await it.enter()
        gaps.append(clock() - began)
        it.refused(probe, DOWN)
        it.leave(probe)
    assert gaps == pytest.approx([0.05, 0.1, 0.2])


async def test_a_cancelled_probe_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gate, "FIRST_PROBE_S", 0.05)
    it = gate()
    await open_breaker(it)
    probe = await it.enter()
    it.leave(probe)
    assert (await asyncio.wait_for(it.enter(), 1)).probe


async def test_when_patience_ends_everybody_who_waits_is_told_what_to_do() -> None:
    it = gate(patience_s=0.2)
    await open_breaker(it)
    results = await asyncio.gather(*(it.enter() for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [TransientError] * 5
    assert "down" in str(results[0])
    assert "Run again" in str(results[0])


async def test_a_retry_after_beyond_patience_is_not_waited_for() -> None:
    it = gate(patience_s=1)
    (permit,) = await permits(it, 1)
    it.refused(permit, ThrottledError("busy", retry_after=3600))
    it.leave(permit)
    with pytest.raises(ThrottledError, match="asks for 3600 s more") as caught:
        await asyncio.wait_for(it.enter(), 0.5)
    assert caught.value.retry_after == pytest.approx(3600, abs=1)


async def test_one_who_stops_waiting_takes_no_place() -> None:
    it = gate(most=1)
    (held,) = await permits(it, 1)
    waiting = asyncio.create_task(it.enter())
    await asyncio.sleep(0)
    waiting.cancel()
    it.leave(held)
    assert await is_let_in(it)


async def test_one_cancelled_at_the_moment_of_entering_gives_the_place_back() -> None:
    it = gate(most=1)
    (held,) = await permits(it, 1)
    waiting = asyncio.create_task(it.enter())
    await asyncio.sleep(0)
    it.leave(held)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await is_let_in(it)
