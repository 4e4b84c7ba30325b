"""Run a row stage: many rows at once, each journalled, in an order that makes a resumed run give the same bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any

from headwater.core.errors import BadOutput, Stopped, TransientError
from headwater.core.fingerprint import Fingerprint
from headwater.core.journal import Entry, Journal
from headwater.core.rows import Reject, Row, row_id, warm_up
from headwater.core.store import OutputWriter, StageOutput
from headwater.stages.answers import Answers
from headwater.stages.base import RowStage, StageContext
from headwater.stages.calls import DirectCall, Engines, Lockstep, LockstepCall

_MAX_OWED_IN_A_ROW = 50
"""So many rows without one success mean that the engine is gone, not that a few calls had bad luck."""
_EMIT_ROWS = 1_000
_LOOK_SECONDS = 0.25
"""How often the runner looks whether it was asked to stop, however long the calls take."""
_GRACE_SECONDS = 30.0
"""How long calls in flight may take to end once the stage stops."""


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
        self._error: Exception | None = None
        asked = {name: config for name, config in stage.engine_configs().items() if name in stage.asks}
        engines = {name: context.engines.get(config) for name, config in asked.items()}
        prices = {name: context.engines.price_names(config) for name, config in asked.items()}
        self._engines = Engines(engines, context.meter, prices)

    async def run(self) -> None:
        if self._finished:
            self._context.note(f"{self._finished:,} rows were already in the journal")
        # Rows are written once all are there: what that has to load is loaded while the first of them are awaited.
        asyncio.get_running_loop().run_in_executor(None, warm_up)
        try:
            await self._stage.open(self._inputs, self._context)
            if self._engines.batched:
                await self._in_windows()
            else:
                await self._sliding()
        finally:
            await self._context.engines.aclose_remote()
        if self._owed:
            raise TransientError(
                f"Stage {self._context.node}: {len(self._owed):,} of {self._inputs['rows'].rows:,} rows are still owed "
                f"after all retries (first: {self._owed[0]}).",
                todo="What is finished is kept; run again to try only what is owed.",
            )

    async def _sliding(self) -> None:
        """Rows start as soon as one of the `concurrency` places is free; each is journalled when it ends."""
        rows = (row for row in _rows(self._inputs["rows"]) if row["id"] not in self._done)

        async def worker() -> None:
            while self._may_go_on() and (row := next(rows, None)) is not None:
                entry = await self._attempt(row, DirectCall(self._engines, Answers(self._journal, row["id"])))
                if entry is not None:
                    self._journal.put(entry)
                    self._count(1)

        await self._finish([worker() for _ in range(self._stage.concurrency)])
        self._raise_error()

    async def _in_windows(self) -> None:
        """Fixed windows in input order, so that an engine inside the process sees the same batches after a crash.

        A window with an owed row is not journalled at all: the batches of its other rows were not those of a run
        without the fault.
        """
        for window in _chunks(_rows(self._inputs["rows"]), self._stage.window):
            if all(row["id"] in self._done for row in window):
                continue
            if self._may_go_on():
                await self._window(window)
            self._raise_error()

    async def _window(self, window: list[Row]) -> None:
        lockstep = Lockstep(self._engines, len(window), self._one_answered)
        entries: list[Entry] = []

        async def attempt(row: Row) -> None:
            call = LockstepCall(self._engines, lockstep)
            try:
                entry = await self._attempt(row, call)
            finally:
                lockstep.leave(call)
            if entry is not None:
                entries.append(entry)

        try:
            await self._finish([attempt(row) for row in window])
        finally:
            await lockstep.aclose()
        self._answered = 0
        if len(entries) == len(window):
            self._journal.put_together(entries)
            self._count(sum(entry.key not in self._done for entry in entries))

    async def _attempt(self, row: Row, call: DirectCall | LockstepCall) -> Entry | None:
        key = row["id"]
        try:
            result = await self._stage.process(row, call)
        except BadOutput as error:
            result = Reject(key, error.reason, error.what, error.raw)
        except BaseException as error:
            call.keep()
            if not isinstance(error, TransientError):
                raise
            self._owe(key, error)
            return None
        self._owed_in_a_row = 0
        if isinstance(result, Reject):
            return Entry(key, False, [{**result.as_row(), "id": key}], call.reading)
        if not result:
            reject = Reject(key, "no_output", "the stage made nothing of this row and gave no reason")
            return Entry(key, False, [reject.as_row()], call.reading)
        rows = [{**made, "id": row_id(self._stage.name, [key], i)} for i, made in enumerate(result)]
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

    async def _finish(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run all of `work`; the first failure is left in `_error`.

        After a failure, or when asked to stop, what is in flight may still end: it is paid for. A window with a failed
        row is spoilt and ends at once.
        """
        pending = {asyncio.ensure_future(self._guarded(item)) for item in work}
        try:
            while pending and self._may_go_on():
                _, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            spoilt = self._engines.batched and not isinstance(self._error, Stopped)
            if pending and not spoilt:
                _, pending = await asyncio.wait(pending, timeout=_GRACE_SECONDS)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._error = self._error or error

    def _may_go_on(self) -> bool:
        if self._error is None:
            try:
                self._context.check()
            except Stopped as stopped:
                self._error = stopped
        return self._error is None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _one_answered(self) -> None:
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


def _rows(source: StageOutput) -> Iterator[Row]:
    for frame in source.frames():
        yield from frame.iter_rows(named=True)


def _chunks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _emit(source: StageOutput, journal: Journal, out: OutputWriter) -> None:
    accepted = 0
    for frame in source.frames(_EMIT_ROWS, columns=["id"]):
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
