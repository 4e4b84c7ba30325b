"""One holder at a time, and none that is dead."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.core.errors import Stopped
from headwater.core.locks import file_lock, free_lock

HOLDER = """
import pathlib, sys, time
from headwater.core.locks import file_lock
with file_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock `tmp_path / "lock"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_waiter_goes_on_when_the_holder_is_killed(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    told: list[str] = []
    threading.Timer(0.5, holder.kill).start()
    started = time.monotonic()
    with file_lock(tmp_path / "lock", waiting=told.append):
        waited = time.monotonic() - started
    assert 0.4 < waited < 5
    assert told == [f"process {holder.pid}"]


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = HOLDER.replace('    print("held"', '    if not os.fork(): time.sleep(30); os._exit(0)\n    print("held"')
    with subprocess.Popen(
        [sys.executable, "-c", f"import os\n{script}", str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "held\n"
        parent.kill()
        started = time.monotonic()
        with file_lock(tmp_path / "lock"):
            waited = time.monotonic() - started
        parent.stdout.close()
    assert waited < 5


def test_a_waiter_can_give_up(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    def poll() -> None:
        raise Stopped("Enough.")

    with pytest.raises(Stopped, match="Enough"), file_lock(tmp_path / "lock", poll=poll):
        pytest.fail("the lock was held by another process")
    assert holder.poll() is None


def test_threads_exclude_one_another_too(tmp_path: Path) -> None:
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        with file_lock(tmp_path / "lock"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), file_lock(tmp_path / "deep" / "lock"):
        raise RuntimeError
    with file_lock(tmp_path / "deep" / "lock", waiting=lambda holder: pytest.fail(f"{holder} still holds it")):
        pass


def test_a_lock_is_cleared_away_only_if_it_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with free_lock(tmp_path / "lock") as free:
        assert not free
    assert (tmp_path / "lock").exists()
    holder.kill()
    holder.wait()
    with free_lock(tmp_path / "lock") as free:
        assert free
        with free_lock(tmp_path / "lock") as twice:
            assert not twice
    assert list(tmp_path.iterdir()) == []


def test_whoever_waited_for_a_lock_that_was_cleared_away_holds_one_that_counts(tmp_path: Path) -> None:
    inside = threading.Event()

    def wait_and_hold() -> None:
        with file_lock(tmp_path / "lock"):
            inside.set()
            time.sleep(0.5)

    with free_lock(tmp_path / "lock") as free:
        assert free
        waiter = threading.Thread(target=wait_and_hold)
        waiter.start()
        time.sleep(0.3)
        assert not inside.is_set()
    assert inside.wait(10)
    with free_lock(tmp_path / "lock") as free:
        assert not free
    waiter.join()


def test_a_lock_on_a_file_that_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes between the opening and the locking: the one instant in which a lock would exclude nobody."""
    lock, really = tmp_path / "lock", fcntl.flock
    removed: list[Path] = []

    def remove_first(handle: int, how: int) -> None:
        if not removed:
            lock.unlink()
            removed.append(lock)
        really(handle, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with file_lock(lock), free_lock(lock) as free:
        assert removed == [lock]
        assert not free
