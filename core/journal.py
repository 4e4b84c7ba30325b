"""The row journal: every finished row of a row stage, durable the moment `put` returns.

SQLite in WAL mode: a committed row survives SIGKILL at any instant. One writer at a time (the stage's lock sees to it).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
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
_LOOKUP_ROWS = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one attempted row."""

    key: str
    """The id of the attempted row."""
    accepted: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows it became when accepted, or one reject row (`core.rows.REJECT_SCHEMA`)."""
    reading: Reading = field(default_factory=Reading)
    """What it cost, so that a resumed run still knows the whole bill."""


class Journal:
    """Append-never: a key is written once; writing it again changes nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise _wrapped(error, path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, entry: Entry) -> None:
        """Keep one row. When this returns, SIGKILL cannot lose it."""
        try:
            self._db.execute("INSERT OR IGNORE INTO rows VALUES (?,?,?,?)", _packed(entry))
        except sqlite3.Error as error:
            raise _wrapped(error, self.path) from error

    def put_together(self, entries: Iterable[Entry]) -> None:
        """Keep several rows as one: after a crash either all are there or none."""
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO rows VALUES (?,?,?,?)", map(_packed, entries))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _wrapped(error, self.path) from error

    def keys(self) -> set[str]:
        """The ids of all rows that need not be done again."""
        return {key for (key,) in self._db.execute("SELECT key FROM rows")}

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
        for (reading,) in self._db.execute("SELECT reading FROM rows"):
            total += Reading.from_list(orjson.loads(reading))
        return total

    def close(self) -> None:
        self._db.close()

    def delete(self) -> None:
        """Remove the journal once its rows are published."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _lookup(self, keys: list[str]) -> Iterator[Entry]:
        if not keys:
            return
        marks = ",".join("?" * len(keys))
        found = {
            key: (accepted, payload, reading)
            for key, accepted, payload, reading in self._db.execute(f"SELECT * FROM rows WHERE key IN ({marks})", keys)
        }
        for key in keys:
            if key in found:
                accepted, payload, reading = found[key]
                yield Entry(key, bool(accepted), orjson.loads(payload), Reading.from_list(orjson.loads(reading)))


def _packed(entry: Entry) -> tuple[str, bool, bytes, bytes]:
    return entry.key, entry.accepted, orjson.dumps(entry.rows), orjson.dumps(entry.reading.as_list())


def _wrapped(error: sqlite3.Error, path: Path) -> PermanentError:
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL:
        return PermanentError(
            f"The disk is full: the journal {path.name} could not be written.",
            todo="Free some space and run again; every row already journalled is kept.",
        )
    return PermanentError(
        f"The journal {path} cannot be used: {error}.",
        todo="If it is damaged, move it away and run again; its rows will be made anew.",
    )
