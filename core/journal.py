"""The row journal: every finished row of a row stage, and what rows in work were answered, kept when `put` returns.

SQLite in WAL mode: a committed row survives SIGKILL at any instant; a power cut may lose the last rows but damages
nothing. One writer at a time (the stage's lock sees to it).
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from headwater.core.errors import PermanentError
from headwater.core.meter import Reading

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    key TEXT PRIMARY KEY,
    accepted INTEGER NOT NULL,
    payload BLOB NOT NULL,
    reading BLOB NOT NULL
) WITHOUT ROWID
"""
_SCHEMA_OF_CALLS = """
CREATE TABLE IF NOT EXISTS calls (
    key TEXT NOT NULL,
    number INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (key, number)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR IGNORE INTO rows VALUES (?,?,?,?)"
_LOOKUP_ROWS = 500
_FULL_BYTES = 1 << 20
"""With less than this free, a failed write is put down to the disk."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one attempted row."""

    key: str
    """The id of the attempted row."""
    accepted: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows it became when accepted, or one reject row (`core.rows.REJECT_SCHEMA`). Plain JSON values; not-a-number
    and infinities come back as None."""
    reading: Reading = field(default_factory=Reading)
    """What it cost, so that a resumed run still knows the whole bill."""


class Journal:
    """Append-never: a key is written once; writing it again changes nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_SCHEMA)
            self._db.execute(_SCHEMA_OF_CALLS)
            self._in_work = {key for (key,) in self._db.execute("SELECT DISTINCT key FROM calls")}
        except sqlite3.Error as error:
            self.close()
            raise _wrapped(error, path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, entry: Entry) -> None:
        """Keep one row. When this returns, SIGKILL cannot lose it. Its calls are kept no longer: the row holds them."""
        packed = _packed(entry)
        try:
            self._db.execute(_INSERT, packed)
            if entry.key in self._in_work:
                self._db.execute("DELETE FROM calls WHERE key = ?", (entry.key,))
                self._in_work.remove(entry.key)
        except sqlite3.Error as error:
            raise _wrapped(error, self.path) from error

    def put_together(self, entries: Iterable[Entry]) -> None:
        """Keep several rows as one: after a crash either all are there or none."""
        self._insert_together(_INSERT, [_packed(entry) for entry in entries])

    def put_calls(self, key: str, calls: Sequence[Any], *, first: int) -> None:
        """Keep what the unfinished row `key` was answered, as its calls number `first` and on. Plain JSON values."""
        self._insert_together(
            "INSERT OR IGNORE INTO calls VALUES (?,?,?)",
            [(key, number, orjson.dumps(call)) for number, call in enumerate(calls, first)],
        )
        self._in_work.add(key)

    def calls(self, key: str) -> list[Any]:
        """What the unfinished row `key` was answered, in the order in which it was kept."""
        if key not in self._in_work:
            return []
        query = "SELECT payload FROM calls WHERE key = ? ORDER BY number"
        return [orjson.loads(payload) for (payload,) in self._select(query, (key,))]

    def keys(self) -> set[str]:
        """The ids of all rows that need not be done again."""
        return {key for (key,) in self._select("SELECT key FROM rows")}

    def entries(self, keys: Iterable[str]) -> Iterator[Entry]:
        """The entries of `keys`, in the order given. A key without an entry is skipped: it is still owed."""
        batch: list[str] = []
        for key in keys:
            batch.append(key)
            if len(batch) == _LOOKUP_ROWS:
                yield from self._lookup(batch)
                batch = []
        yield from self._lookup(batch)

    def reading(self) -> Reading:
        """What all journalled rows cost together."""
        total = Reading()
        for (reading,) in self._select("SELECT reading FROM rows"):
            total += Reading.from_list(orjson.loads(reading))
        return total

    def close(self) -> None:
        self._db.close()

    def delete(self) -> None:
        """Remove the journal once its rows are published."""
        self.close()
        delete_journal(self.path)

    def _insert_together(self, query: str, values: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._db.execute("BEGIN")
            self._db.executemany(query, values)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _wrapped(error, self.path) from error

    def _select(self, query: str, values: Sequence[str] = ()) -> Iterator[Any]:
        try:
            yield from self._db.execute(query, values)
        except sqlite3.Error as error:
            raise _wrapped(error, self.path) from error

    def _lookup(self, keys: list[str]) -> Iterator[Entry]:
        if not keys:
            return
        marks = ",".join("?" * len(keys))
        found = {
            key: (accepted, payload, reading)
            for key, accepted, payload, reading in self._select(f"SELECT * FROM rows WHERE key IN ({marks})", keys)
        }
        for key in keys:
            if key in found:
                accepted, payload, reading = found[key]
                yield Entry(key, bool(accepted), orjson.loads(payload), Reading.from_list(orjson.loads(reading)))


def delete_journal(path: Path) -> None:
    """Remove the journal at `path` with its side files, if it is there."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _packed(entry: Entry) -> tuple[str, bool, bytes, bytes]:
    try:
        payload = orjson.dumps(entry.rows)
    except TypeError as error:
        raise PermanentError(
            f"Row {entry.key} became something that cannot be stored: {error}.",
            todo="A row stage returns plain JSON values, its text cleaned by core.text.clean_text.",
        ) from error
    return entry.key, entry.accepted, payload, orjson.dumps(entry.reading.as_list())


def _wrapped(error: sqlite3.Error, path: Path) -> PermanentError:
    if _disk_is_full(error, path):
        return PermanentError(
            f"The disk is full: the journal {path.name} could not be written.",
            todo="Free some space and run again; every row already journalled is kept.",
        )
    return PermanentError(
        f"The journal {path} cannot be used: {error}.",
        todo="If it is damaged, move it away and run again; its rows will be made anew.",
    )


def _disk_is_full(error: sqlite3.Error, path: Path) -> bool:
    """SQLite says so itself, except where it only met a failed write of its side files."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code == sqlite3.SQLITE_FULL:
        return True
    return bool(code & 0xFF == sqlite3.SQLITE_IOERR) and shutil.disk_usage(path.parent).free < _FULL_BYTES
