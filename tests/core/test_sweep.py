"""What killed processes leave behind is cleared away; what a living one owns is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.core.fingerprint import Fingerprint
from headwater.core.journal import Entry, Journal
from headwater.core.locks import file_lock
from headwater.core.rows import Reject, schema
from headwater.core.store import OutputWriter, Workspace, load_output, set_aside_damaged
from headwater.core.sweep import DAMAGED_DAYS, SETTLED_SECONDS, sweep

PRINT = Fingerprint({"stage": "numbers"})
NAME = f"numbers-{PRINT.digest}"
MAKER = """
import os, pathlib, sys
from headwater.core.locks import file_lock
from headwater.core.store import Workspace
from headwater.tests.core.test_sweep import NAME, PRINT, writer
workspace = Workspace(pathlib.Path(sys.argv[1]))
with file_lock(workspace.lock_path("numbers", PRINT)):
    out = writer(workspace)
    print("writing", flush=True)
    sys.stdin.readline()
    out.publish(PRINT, {"node": "numbers"})
"""


def writer(workspace: Workspace) -> OutputWriter:
    out = OutputWriter(workspace.output_path("numbers", PRINT), schema(n=pa.int64()), "Stage numbers")
    out.write_rows([{"id": "a", "n": 1}])
    return out


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def _maker(workspace: Workspace) -> subprocess.Popen[str]:
    """A process that holds the lock of an output and has begun to write it; a line on its stdin lets it publish."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(workspace.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def _there(workspace: Workspace) -> list[str]:
    """Everything below `stages/` except the two folders that always stay."""
    kept = (".locks", ".journals")
    places = [workspace.stages, *(workspace.stages / name for name in kept)]
    return sorted(path.name for place in places if place.exists() for path in place.iterdir() if path.name not in kept)


def test_what_a_killed_process_was_writing_goes_with_its_lock(workspace: Workspace) -> None:
    maker = _maker(workspace)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert _there(workspace) == [f".unfinished-{NAME}", NAME]

    sweep(workspace)

    assert _there(workspace) == []


def test_what_a_living_process_is_writing_stays_and_is_published(workspace: Workspace) -> None:
    maker = _maker(workspace)
    sweep(workspace)
    assert _there(workspace) == [f".unfinished-{NAME}", NAME]
    maker.communicate("go on\n")
    assert maker.returncode == 0
    output = load_output(workspace.output_path("numbers", PRINT))
    assert output is not None and output.rows == 1


def test_finished_outputs_and_the_journals_of_unfinished_ones_stay(workspace: Workspace) -> None:
    writer(workspace).publish(PRINT, {"node": "numbers"})
    unfinished = Fingerprint({"stage": "ask"})
    with (
        file_lock(workspace.lock_path("ask", unfinished)),
        Journal(workspace.journal_path("ask", unfinished)) as journal,
    ):
        journal.put(Entry("k", True, [{"id": "a", "n": 1}]))

    sweep(workspace)

    assert _there(workspace) == sorted([NAME, f"ask-{unfinished.digest}.sqlite"])
    with Journal(workspace.journal_path("ask", unfinished)) as journal:
        assert journal.keys() == {"k"}


def _journal(workspace: Workspace) -> None:
    with (
        file_lock(workspace.lock_path("numbers", PRINT)),
        Journal(workspace.journal_path("numbers", PRINT)) as journal,
    ):
        journal.put(Entry("k", True, [{"id": "a", "n": 1}]))


def _failure(workspace: Workspace) -> None:
    out = writer(workspace)
    out.reject([Reject("b", "too_long", "it is long", "the text")])
    out.keep_rejects()
    out.abandon()


@pytest.mark.parametrize("leave", [_journal, _failure])
def test_a_journal_or_a_failure_is_cleared_away_once_its_output_is_whole(
    workspace: Workspace, leave: Callable[[Workspace], None]
) -> None:
    leave(workspace)
    sweep(workspace)
    (left,) = _there(workspace)
    assert left in (f"{NAME}.sqlite", f".failed-{NAME}")

    writer(workspace).publish(PRINT, {"node": "numbers"})
    (workspace.output_path("numbers", PRINT) / "stray").touch()
    sweep(workspace)
    assert _there(workspace) == sorted([NAME, left]), "the output is damaged: its rows are still needed"

    (workspace.output_path("numbers", PRINT) / "stray").unlink()
    sweep(workspace)
    assert _there(workspace) == [NAME]


def test_a_damaged_output_can_be_looked_at_for_some_days(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    writer(workspace).publish(PRINT, {"node": "numbers"})
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: int((time.time() - (DAMAGED_DAYS + 0.1) * 86_400) * 1e9))
        old = set_aside_damaged(workspace.output_path("numbers", PRINT))
    writer(workspace).publish(PRINT, {"node": "numbers"})
    new = set_aside_damaged(workspace.output_path("numbers", PRINT))
    assert old is not None and new is not None

    sweep(workspace)

    assert _there(workspace) == [new.name]


WRITER = """
import os, pathlib, signal, sys
pathlib.Path(f"{sys.argv[1]}.{os.getpid()}").write_text("half")
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
print("written", flush=True)
sys.stdin.readline()
"""


def _temporary(path: Path, fate: str, age: float) -> tuple[subprocess.Popen[str], Path]:
    """A process that has written a temporary file, and that file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", WRITER, str(path), fate]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    if fate == "dies":
        assert process.wait() == -signal.SIGKILL
    file = path.with_name(f"{path.name}.{process.pid}")
    os.utime(file, (time.time() - age,) * 2)
    return process, file


@pytest.mark.parametrize("place", ["runs/tiny/2026-01-01T00-00-00/.run.json", "cache/.rates.json"])
def test_the_temporary_files_of_dead_processes_go_and_all_others_stay(workspace: Workspace, place: str) -> None:
    old, new = 2 * SETTLED_SECONDS, 0.0
    _, abandoned = _temporary(workspace.root / place, "dies", old)
    _, fresh = _temporary(workspace.root / place, "dies", new)
    living, held = _temporary(workspace.root / place, "lives", old)
    others = [abandoned.with_name(name) for name in (".alive", ".notes.txt", f"run.{abandoned.suffix[1:]}")]
    for other in others:
        other.touch()
        os.utime(other, (0, 0))

    sweep(workspace)

    assert sorted(abandoned.parent.iterdir()) == sorted([fresh, held, *others])
    living.communicate("go on\n")


def test_a_workspace_that_is_new_has_nothing_to_sweep(workspace: Workspace) -> None:
    sweep(workspace)
    assert list(workspace.root.iterdir()) == []


WORKER = """
import os, pathlib, sys, time
from headwater.core.locks import file_lock
from headwater.core.store import Workspace
from headwater.core.sweep import sweep
root, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for _ in range(rounds):
    sweep(Workspace(root))
    with file_lock(root / "stages" / ".locks" / "shared"):
        os.close(os.open(root / "inside", os.O_CREAT | os.O_EXCL))
        (root / "stages" / ".unfinished-shared").mkdir()
        sweep(Workspace(root))
        (root / "stages" / ".unfinished-shared").rmdir()
        os.unlink(root / "inside")
        with (root / "count").open("a") as file:
            file.write("x")
"""


def test_sweeping_never_lets_two_into_one_lock(workspace: Workspace) -> None:
    """Lock files are removed and made anew all the time here; a lock on a removed file must not count."""
    workspace.stages.mkdir()
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(workspace.root), "30"], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, said
    assert (workspace.root / "count").stat().st_size == 4 * 30
