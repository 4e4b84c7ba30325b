"""How a row reaches the engines: alone, or in lockstep with the other rows of its window."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from headwater.core.errors import BadOutput, HeadwaterError, TransientError
from headwater.core.meter import Meter, Reading
from headwater.llm.types import ChatRequest, Completion, Engine
from headwater.stages.answers import Answer, Answers

Result = Completion | HeadwaterError
_Key = tuple[str, str]
"""Engine name and request id."""
_BYTES_PER_TOKEN = 3
"""Of prompts, for a first guess."""


class Engines:
    """The engines of one stage by the names it calls them, with the meter that counts what they are asked.

    `prices` holds the names under which the recipe may have priced each of them.
    """

    def __init__(self, engines: Mapping[str, Engine], meter: Meter, prices: Mapping[str, Sequence[str]]) -> None:
        self._engines = engines
        self._prices = prices
        self._models = {name: engine.identity.model for name, engine in engines.items()}
        self._meter = meter
        self._dearest: dict[str, Reading] = {}
        self._in_flight = 0
        self._ended = asyncio.Event()

    @property
    def batched(self) -> bool:
        """Whether any of them is inside this process."""
        return any(engine.batched for engine in self._engines.values())

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def read(self, name: str, tokens: tuple[int, int, int], seconds: float) -> Reading:
        """Meter one call to the engine `name`; `tokens` are those in, cached and out."""
        dollars = self._meter.price(self._models[name], *tokens, names=self._prices[name])
        reading = Reading(1, *tokens, seconds, dollars)
        self._meter.add(reading)
        seen = self._dearest.get(name, Reading())
        self._dearest[name] = Reading(
            tokens_in=max(seen.tokens_in, reading.tokens_in),
            tokens_out=max(seen.tokens_out, reading.tokens_out),
            dollars=max(seen.dollars, reading.dollars),
        )
        return reading

    @asynccontextmanager
    async def within_budget(self, name: str, request: ChatRequest) -> AsyncIterator[None]:
        """Waits until the budget holds this call beside those in flight; raises `Stopped` when it holds none.

        A call is taken to use as much as the dearest one so far. Before there was one, it is taken to use all the room
        that it asks for; and if the budget doesn't hold that, it goes out alone.
        """
        if self.batched or not self._meter.limited:
            yield
            return
        while not self._meter.reserve(call := self._dearest.get(name) or self._at_most(name, request)):
            if not self._in_flight:
                self._meter.check()
                if name in self._dearest:
                    raise self._meter.stopped(call)
                call = Reading()
                break
            await self._ended.wait()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._meter.release(call)
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()

    def _at_most(self, name: str, request: ChatRequest) -> Reading:
        tokens_in = sum(len(message.content.encode()) for message in request.messages) // _BYTES_PER_TOKEN
        tokens = (tokens_in, 0, request.sampling.max_tokens)
        return Reading(0, *tokens, dollars=self._meter.price(self._models[name], *tokens, names=self._prices[name]))


class _RowCall:
    """One row's way to the engines; adds up what the row used."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.reading = Reading()

    async def chat(self, request: ChatRequest, engine: str = "engine") -> Completion:
        """The completion; a failed request raises its typed error."""
        async with self._engines.within_budget(engine, request):
            started = time.monotonic()
            result = await self._result(request, engine)
            seconds = round(time.monotonic() - started, 4)
            if not isinstance(result, Completion | BadOutput):
                raise result
            tokens = result.usage.counts if isinstance(result, Completion) else result.tokens
            return self._paid(request, engine, Answer(result, self._engines.read(engine, tokens, seconds)))

    def keep(self) -> None:
        """Called when the row ends unfinished: what it was answered may be of use to a later run."""

    async def _result(self, request: ChatRequest, engine: str) -> Result:
        raise NotImplementedError

    def _paid(self, request: ChatRequest, engine: str, answer: Answer) -> Completion:
        self.reading += answer.reading
        if isinstance(answer.result, BadOutput):
            raise answer.result
        return answer.result


class DirectCall(_RowCall):
    """Asks at once. What a row was answered before the run was stopped or killed isn't asked again."""

    def __init__(self, engines: Engines, answers: Answers) -> None:
        super().__init__(engines)
        self._answers = answers
        self._in_flight = 0

    async def chat(self, request: ChatRequest, engine: str = "engine") -> Completion:
        answer = self._answers.take(engine, request)
        if answer is not None:
            return super()._paid(request, engine, answer)
        self.keep()
        self._in_flight += 1
        try:
            return await super().chat(request, engine)
        finally:
            self._in_flight -= 1
            if self._in_flight:
                self.keep()

    def keep(self) -> None:
        self._answers.keep()

    async def _result(self, request: ChatRequest, engine: str) -> Result:
        result: Result = _no_outcome(engine, request.id)
        async for outcome in self._engines[engine].chat([request]):
            result = outcome.result
        return result

    def _paid(self, request: ChatRequest, engine: str, answer: Answer) -> Completion:
        self._answers.add(engine, request, answer)
        return super()._paid(request, engine, answer)


class LockstepCall(_RowCall):
    """The request goes out together with those of the other rows. A row that isn't finished is asked for anew: the
    others' requests made the batch that answered it."""

    def __init__(self, engines: Engines, lockstep: Lockstep) -> None:
        super().__init__(engines)
        self._lockstep = lockstep

    async def _result(self, request: ChatRequest, engine: str) -> Result:
        return await self._lockstep.ask(self, engine, request)


class Lockstep:
    """Sends requests to the engines only when every row of the window waits for one, sorted, hence reproducibly."""

    def __init__(self, engines: Engines, rows: int, answered: Callable[[], None]) -> None:
        self._engines = engines
        self._active = rows
        self._answered = answered
        self._waiting: dict[_Key, tuple[LockstepCall, ChatRequest, asyncio.Future[Result]]] = {}
        self._asking: set[LockstepCall] = set()
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, call: LockstepCall, engine: str, request: ChatRequest) -> Result:
        """The outcome of `request`, which waits until every row of the window has one to send."""
        if (engine, request.id) in self._waiting:
            raise ValueError(f"two requests with the id {request.id!r} wait at once")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[engine, request.id] = (call, request, future)
        self._asking.add(call)
        self._send_if_all_wait()
        return await future

    def leave(self, call: LockstepCall) -> None:
        """A row ended; those left may now all be waiting."""
        self._active -= 1
        if call in self._asking:  # it left behind a question of its own making
            self._asking.discard(call)
            self._waiting = {key: item for key, item in self._waiting.items() if item[0] is not call}
        self._send_if_all_wait()

    async def aclose(self) -> None:
        """Stop what is being sent, if anything is."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    def _send_if_all_wait(self) -> None:
        """A task starts one turn of the loop later, so that a row that asks several things at once gets them all in."""
        if self._sending is None and self._waiting and len(self._asking) == self._active:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        batch, self._waiting = self._waiting, {}
        self._asking.clear()
        futures = {key: future for key, (_, _, future) in batch.items()}
        try:
            for name, keys in itertools.groupby(sorted(batch), key=lambda key: key[0]):
                async for outcome in self._engines[name].chat([batch[key][1] for key in keys]):
                    _settle(futures[name, outcome.request_id], outcome.result)
                    self._answered()
            for (name, request_id), future in futures.items():
                _settle(future, _no_outcome(name, request_id))
        except BaseException as error:
            # whatever it was, no row may be left waiting for ever
            told = error if isinstance(error, Exception) else TransientError(f"The engine ended: {error!r}.")
            for future in futures.values():
                if not future.done():
                    future.set_exception(told)
            if not isinstance(error, Exception):
                raise
        self._sending = None
        self._send_if_all_wait()


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():  # else its row was cancelled meanwhile
        future.set_result(result)


def _no_outcome(engine: str, request_id: str) -> TransientError:
    return TransientError(f"The engine {engine!r} gave no outcome for request {request_id}.")
