"""Clear away what killed processes left in a workspace: only what no living process owns and nobody misses."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from headwater.core.journal import delete_journal
from headwater.core.locks import free_lock
from headwater.core.store import DAMAGED, FAILED, UNFINISHED, Workspace, load_output

DAMAGED_DAYS = 7
"""How long an output set aside because it did not match its manifest may be looked at."""


def sweep(workspace: Workspace) -> None:
    """Remove unfinished outputs and locks of dead processes, and what was kept to be looked at and is out of date.

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
