"""Clear away what killed processes left in a workspace: only what no living process owns and nobody misses."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from headwater.core.journal import delete_journal
from headwater.core.locks import free_lock
from headwater.core.store import DAMAGED, FAILED, UNFINISHED, Workspace, load_output

DAMAGED_DAYS = 7
"""How long an output set aside because it did not match its manifest may be looked at."""

SETTLED_SECONDS = 10
"""Age from which a temporary file may be taken for abandoned. Writing one takes milliseconds; its process may be out of
sight, in another container."""


def sweep(workspace: Workspace) -> None:
    """Remove what dead processes left: unfinished outputs, locks, temporary files; and what was kept too long.

    An output belongs to whoever holds its lock; everything of it is removed under that lock, which is not waited for.
    """
    for name in sorted(set(_names(workspace))):
        with free_lock(workspace.stages / ".locks" / name) as free:
            if free:
                _sweep_output(workspace.stages, name)
    oldest = time.time_ns() - DAMAGED_DAYS * 86_400 * 10**9
    for path in workspace.stages.glob(f"{DAMAGED}*"):
        stamp = path.name.rpartition("-")[2]
        if stamp.isdecimal() and int(stamp) < oldest:
            shutil.rmtree(path, ignore_errors=True)
    for path in (*workspace.runs.glob("*/*/.*.*"), *workspace.cache.glob(".*.*")):
        _sweep_temporary(path)


def _names(workspace: Workspace) -> Iterator[str]:
    """The outputs that left something beside themselves."""
    for kind in (UNFINISHED, FAILED):
        yield from (path.name.removeprefix(kind) for path in workspace.stages.glob(f"{kind}*"))
    yield from (path.stem for path in (workspace.stages / ".journals").glob("*.sqlite"))
    yield from (path.name for path in (workspace.stages / ".locks").glob("*"))


def _sweep_output(stages: Path, name: str) -> None:
    shutil.rmtree(stages / f"{UNFINISHED}{name}", ignore_errors=True)
    failed, journal = stages / f"{FAILED}{name}", stages / ".journals" / f"{name}.sqlite"
    if (failed.exists() or journal.exists()) and load_output(stages / name) is not None:
        shutil.rmtree(failed, ignore_errors=True)
        delete_journal(journal)


def _sweep_temporary(path: Path) -> None:
    """Remove `.<name>.<process>`: a small file that its process was about to put in the place of `<name>`."""
    number = path.name.rpartition(".")[2]
    with contextlib.suppress(OSError):  # the file went meanwhile, or is not ours to remove
        if number.isdecimal() and time.time() - path.stat().st_mtime > SETTLED_SECONDS and not _lives(int(number)):
            path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it lives, and is somebody else's
        return True
    return True
