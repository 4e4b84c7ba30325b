"""Run a row stage: many rows at once, each journalled, in an order that makes a resumed run give the same bytes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from headwater.core.errors import BadOutput, HeadwaterError, TransientError
from headwater.core.fingerprint import Fingerprint
from headwater.core.journal import Entry, Journal
from headwater.core.meter import Reading
from headwater.core.rows import Reject, Row, row_id
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.types import ChatRequest, Completion, Engine
from headwater.stages.base import RowStage, StageContext

_MAX_OWED_IN_A_ROW = 50
"""So many rows without one success mean that the engine is gone, not that a few calls had bad luck."""
_EMIT_ROWS = 1_000

T = TypeVar("T")


def run_rows(
    stage: RowStage[Any],
    inputs: Mapping[str, StageOutput],
    out: OutputWriter,
    context: StageContext,
    fingerprint: Fingerprint,
) -> Journal:
    """Process every row of `inputs["rows"]` that the journal lacks, then write all of them to `out` in input order.

    Returns the open journal: its owner deletes it once the output is published. Raises TransientError when rows are
    still owed at the end.
    """
    journal = Journal(context.workspace.journal_path(stage.name, fingerprint))
    try:
        asyncio.run(_Runner(stage, inputs, context, journal).run())
        _emit(inputs["rows"], journal, out)
    except BaseException:
        journal.close()
        raise
    return journal


class _Runner:
    def __init__(
        self, stage: RowStage[Any], inputs: Mapping[str, StageOutput], context: StageContext, journal: Journal
    ) -> None:
        self._stage = stage
        self._inputs = inputs
        self._context = context
        self._journal = journal
        self._done = journal.keys()
        self._finished = len(self._done)
        self._owed: list[str] = []
        self._owed_in_a_row = 0
        self._answered = 0
        self._engines = {name: context.engines.get(config) for name, config in stage.engine_configs().items()}
        self._models = {name: engine.identity.model for name, engine in self._engines.items()}

    async def run(self) -> None:
        if self._finished:
            self._context.note(f"{self._finished:,} rows were already in the journal")
        try:
            await self._stage.open(self._inputs, self._context)
            if any(engine.batched for engine in self._engines.values()):
                await self._in_windows()
            else:
                await self._sliding()
        finally:
            await self._context.engines.aclose_remote()
        if self._owed:
            raise TransientError(
                f"Stage {self._context.node}: {len(self._owed):,} of {self._inputs['rows'].rows:,} rows are still owed "
                f"after all retries (first: {self._owed[0]}).",
                todo="Everything else is kept; run again to try only these.",
            )

    async def _sliding(self) -> None:
        """Rows start as soon as one of the `concurrency` places is free; each is journalled when it ends."""
        rows = (row for row in _rows(self._inputs["rows"]) if row["id"] not in self._done)

        async def worker() -> None:
            for row in rows:
                self._context.check()
                entry = await self._attempt(row, _DirectCall(self))
                if entry is not None:
                    self._journal.put(entry)
                    self._count(1)

        await _together([worker() for _ in range(self._stage.concurrency)])

    async def _in_windows(self) -> None:
        """Fixed windows in input order, so that an engine inside the process sees the same batches after a crash."""
        for window in _chunks(_rows(self._inputs["rows"]), self._stage.window):
            if all(row["id"] in self._done for row in window):
                continue
            self._context.check()
            self._answered = 0
            lockstep = _Lockstep(self, len(window))
            entries = await _together([self._in_lockstep(row, lockstep) for row in window])
            finished = [entry for entry in entries if entry is not None]
            self._journal.put_together(finished)
            self._answered = 0
            self._count(sum(entry.key not in self._done for entry in finished))

    async def _in_lockstep(self, row: Row, lockstep: _Lockstep) -> Entry | None:
        try:
            return await self._attempt(row, _LockstepCall(self, lockstep))
        finally:
            lockstep.leave()

    async def _attempt(self, row: Row, call: _MeteredCall) -> Entry | None:
        key = row["id"]
        try:
            result = await self._stage.process(row, call)
        except BadOutput as error:
            result = Reject(key, error.reason, error.what, error.raw)
        except TransientError as error:
            self._owe(key, error)
            return None
        self._owed_in_a_row = 0
        if not result:
            result = Reject(key, "no_output", "the stage made nothing of this row and gave no reason")
        if isinstance(result, Reject):
            return Entry(key, False, [result.as_row()], call.reading)
        rows = [{"id": row_id(self._stage.name, [key], i), **made} for i, made in enumerate(result)]
        return Entry(key, True, rows, call.reading)

    def _owe(self, key: str, error: TransientError) -> None:
        self._owed.append(key)
        self._owed_in_a_row += 1
        self._context.events.emit("row_owed", stage=self._context.node, row=key, why=error.what)
        if self._owed_in_a_row >= _MAX_OWED_IN_A_ROW:
            raise TransientError(
                f"Stage {self._context.node}: the last {self._owed_in_a_row} rows all failed; the last one said: "
                f"{error.what}",
                todo="Check the engine, then run again; everything finished is kept.",
            ) from error

    def answered(self) -> None:
        """One more request of the current window has its outcome: shows progress between journal writes."""
        self._answered += 1
        self._show()

    def _count(self, rows: int) -> None:
        self._finished += rows
        self._show()

    def _show(self) -> None:
        total = self._context.meter.total
        rows = self._inputs["rows"].rows
        self._context.events.progress(
            self._context.node,
            min(self._finished + self._answered, rows),
            rows,
            tokens_out=total.tokens_out,
            tokens_in=total.tokens_in,
            dollars=total.dollars,
        )

    def read(self, name: str, completion: Completion, seconds: float) -> Reading:
        """The meter reading of one completed call to the engine `name`."""
        usage = completion.usage
        dollars = self._context.meter.price(self._models[name], usage.tokens_in, usage.tokens_cached, usage.tokens_out)
        reading = Reading(1, usage.tokens_in, usage.tokens_cached, usage.tokens_out, seconds, dollars)
        self._context.meter.add(reading)
        return reading

    def engine(self, name: str) -> Engine:
        return self._engines[name]


class _MeteredCall:
    """One row's way to the engines; adds up what the row used."""

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self.reading = Reading()

    async def chat(self, request: ChatRequest, engine: str = "engine") -> Completion:
        started = time.monotonic()
        result = await self._result(request, engine)
        if isinstance(result, HeadwaterError):
            raise result
        self.reading += self._runner.read(engine, result, round(time.monotonic() - started, 4))
        return result

    async def _result(self, request: ChatRequest, engine: str) -> Completion | HeadwaterError:
        raise NotImplementedError


class _DirectCall(_MeteredCall):
    async def _result(self, request: ChatRequest, engine: str) -> Completion | HeadwaterError:
        async for outcome in self._runner.engine(engine).chat([request]):
            return outcome.result
        return TransientError(f"The engine {engine!r} gave no outcome for request {request.id}.")


class _LockstepCall(_MeteredCall):
    def __init__(self, runner: _Runner, lockstep: _Lockstep) -> None:
        super().__init__(runner)
        self._lockstep = lockstep

    async def _result(self, request: ChatRequest, engine: str) -> Completion | HeadwaterError:
        return await self._lockstep.ask(engine, request)


class _Lockstep:
    """Sends requests to the engines only when every row of the window waits for one, sorted, hence reproducibly."""

    def __init__(self, runner: _Runner, rows: int) -> None:
        self._runner = runner
        self._active = rows
        self._waiting: dict[tuple[str, str], tuple[ChatRequest, asyncio.Future[Completion | HeadwaterError]]] = {}
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, engine: str, request: ChatRequest) -> Completion | HeadwaterError:
        future: asyncio.Future[Completion | HeadwaterError] = asyncio.get_running_loop().create_future()
        if (engine, request.id) in self._waiting:
            raise ValueError(f"two requests with the id {request.id!r} wait at once")
        self._waiting[engine, request.id] = (request, future)
        self._send_if_all_wait()
        return await future

    def leave(self) -> None:
        """A row ended; those left may now all be waiting."""
        self._active -= 1
        self._send_if_all_wait()

    def _send_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._active:
            batch, self._waiting = self._waiting, {}
            self._sending = asyncio.get_running_loop().create_task(self._send(batch))

    async def _send(
        self, batch: dict[tuple[str, str], tuple[ChatRequest, asyncio.Future[Completion | HeadwaterError]]]
    ) -> None:
        try:
            for name, group in itertools.groupby(sorted(batch), key=lambda key: key[0]):
                requests = [batch[key][0] for key in group]
                async for outcome in self._runner.engine(name).chat(requests):
                    batch[name, outcome.request_id][1].set_result(outcome.result)
                    self._runner.answered()
        except BaseException as error:
            for _, future in batch.values():
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the rest and is raised as itself."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _rows(source: StageOutput) -> Iterator[Row]:
    for frame in source.frames():
        yield from frame.iter_rows(named=True)


def _chunks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _emit(source: StageOutput, journal: Journal, out: OutputWriter) -> None:
    accepted = 0
    for frame in source.frames(_EMIT_ROWS):
        rows: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        for entry in journal.entries(frame["id"].to_list()):
            if entry.accepted:
                accepted += 1
                rows += entry.rows
            else:
                rejects += [Reject(**reject) for reject in entry.rows]
        out.write_rows(rows)
        out.reject(rejects)
    out.account(attempted=source.rows, accepted=accepted)
