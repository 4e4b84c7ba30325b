"""What the journal acknowledged is there, whatever happened next."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.core.errors import PermanentError
from headwater.core.journal import Entry, Journal, delete_journal
from headwater.core.meter import Reading


def _entry(key: str, **row: object) -> Entry:
    return Entry(key, True, [{"id": key, **row}], Reading(1, 10, 2, 3, 0.5, 0.25))


def test_entries_come_back_whole_in_the_order_asked_for(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        entries = [
            _entry("b", text="héllo", tags=["x"], nested={"n": None}),
            Entry("a", False, [{"id": "a", "reason": "cut", "detail": "", "raw": "the te"}]),
            Entry("c", True, [{"id": "c0"}, {"id": "c1"}]),
        ]
        for entry in entries:
            journal.put(entry)
    with Journal(tmp_path / "j.sqlite") as journal:
        assert list(journal.entries(["c", "missing", "b", "a"])) == [entries[2], entries[0], entries[1]]
        assert journal.keys() == {"a", "b", "c"}


def test_more_entries_than_one_lookup_holds_keep_their_order(tmp_path: Path) -> None:
    keys = [str(n) for n in range(1_234)]
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.put_together(_entry(key) for key in keys)
        random.Random(0).shuffle(keys)
        assert [entry.key for entry in journal.entries(keys)] == keys
        assert list(journal.entries([])) == []


def test_a_key_is_written_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.put(_entry("a", text="first"))
        journal.put(_entry("a", text="second"))
        journal.put_together([_entry("b"), _entry("a", text="third")])
        assert [entry.rows[0].get("text") for entry in journal.entries(["a", "b"])] == ["first", None]


def test_the_bill_survives(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.put(_entry("a"))
        journal.put(_entry("a"))
        journal.put(_entry("b"))
    with Journal(tmp_path / "j.sqlite") as journal:
        assert journal.reading() == Reading(2, 20, 4, 6, 1.0, 0.5)


def test_rows_kept_together_are_all_there_or_none(tmp_path: Path) -> None:
    def entries() -> Iterator[Entry]:
        yield _entry("a")
        yield _entry("b", text="\ud800")

    with Journal(tmp_path / "j.sqlite") as journal:
        with pytest.raises(PermanentError, match="Row b became something that cannot be stored"):
            journal.put_together(entries())
        assert journal.keys() == set()
        journal.put(_entry("c"))
        assert journal.keys() == {"c"}


def test_what_is_no_json_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal, pytest.raises(PermanentError, match="Row a became"):
        journal.put(_entry("a", blob=b"bytes"))


def test_the_calls_of_a_row_in_work_are_kept_in_order_until_the_row_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        journal.put_calls("a", [{"said": "one"}, {"said": "two"}], first=0)
        journal.put_calls("b", ["other"], first=0)
    with Journal(path) as journal:
        journal.put_calls("a", [{"said": "three"}], first=2)
        assert journal.calls("a") == [{"said": "one"}, {"said": "two"}, {"said": "three"}]
        assert journal.keys() == set()
        journal.put(_entry("a"))
        journal.put(_entry("c"))
        assert journal.calls("a") == []
    with Journal(path) as journal:
        assert (journal.calls("a"), journal.calls("b"), journal.calls("never")) == ([], ["other"], [])
        assert journal.reading() == _entry("a").reading + _entry("c").reading


WRITER = """
import pathlib, sys
from headwater.core.journal import Entry, Journal
journal = Journal(pathlib.Path(sys.argv[1]))
size = int(sys.argv[3])
for n in range(int(sys.argv[2]), 10**9, size):
    entries = [Entry(str(n + i), True, [{"id": str(n + i), "text": "x" * 200}]) for i in range(size)]
    journal.put(entries[0]) if size == 1 else journal.put_together(entries)
    print(n + size, flush=True)
"""


@pytest.mark.parametrize("size", [1, 7])
def test_a_writer_killed_at_any_instant_loses_nothing_it_acknowledged(tmp_path: Path, size: int) -> None:
    """`size` rows at a time: what is acknowledged is there, and nothing is there in part."""
    chance = random.Random(size)
    path, at = tmp_path / "j.sqlite", 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(at), str(size)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in writer.stdout.read().splitlines() if line]
        writer.wait()
        with Journal(path) as journal:
            there = set(map(int, journal.keys()))
        assert there == set(range(len(there)))
        assert len(there) >= max(acknowledged, default=at + size)
        assert len(there) % size == 0
        at = len(there)


def test_a_damaged_journal_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"this is no database" * 1_000)
    with pytest.raises(PermanentError, match="move it away"):
        Journal(path)


def test_damage_in_the_middle_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        journal.put_together(_entry(str(n), text="x" * 500) for n in range(500))
    content = bytearray(path.read_bytes())
    content[12_288:] = os.urandom(len(content) - 12_288)  # past the schema and the calls
    path.write_bytes(content)
    with Journal(path) as journal, pytest.raises(PermanentError, match="move it away"):
        list(journal.entries(str(n) for n in range(500)))


def test_deleting_leaves_nothing_behind(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.put(_entry("a"))
    assert len(list(tmp_path.iterdir())) == 3
    journal.delete()
    assert list(tmp_path.iterdir()) == []
    delete_journal(tmp_path / "j.sqlite")


def test_a_full_disk_is_told_as_such_and_what_was_kept_stays(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(2_048) / "j.sqlite"
    kept = _fill(path)
    small_disk(4_096)
    with Journal(path) as journal:
        assert journal.keys() == kept
        journal.put(_entry("after"))
        assert journal.keys() == {*kept, "after"}


def test_a_disk_without_room_for_a_journal_is_told_as_such(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(512)
    (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
    with pytest.raises(PermanentError, match="The disk is full"):
        Journal(disk / "j.sqlite")


def _fill(path: Path) -> set[str]:
    kept: set[str] = set()
    with Journal(path) as journal, pytest.raises(PermanentError, match="The disk is full") as caught:
        while True:
            journal.put(_entry(str(len(kept)), text="x" * 1_000))
            kept.add(str(len(kept)))
    assert "every row already journalled is kept" in caught.value.todo
    assert len(kept) > 50
    return kept
