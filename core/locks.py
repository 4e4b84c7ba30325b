"""Locks between processes. The kernel releases them when their holder dies, so none is ever left behind."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import ConfigError

_POLL_SECONDS = 0.2
_open: set[int] = set()


@contextmanager
def file_lock(
    path: Path, *, waiting: Callable[[str], None] | None = None, poll: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for whoever holds it.

    `waiting` is told once who holds it; `poll` is called while waiting and may raise to give up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    _open.add(handle)
    try:
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and waiting is not None:
                    holder = os.pread(handle, 64, 0).decode("ascii", "replace").strip()
                    waiting(holder or "another process")
                    told = True
                if poll is not None:
                    poll()
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise ConfigError(
                    f"The file system of {path.parent} cannot lock files ({error.strerror}).",
                    todo="Put the workspace on a local disk (--workspace or HEADWATER_HOME).",
                ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        if handle in _open:  # else this is a forked child, which closed it at birth
            _open.discard(handle)
            os.close(handle)


def _close_in_child() -> None:
    """A forked worker (of vLLM, of a data loader) that outlives its killed parent must not keep the locks."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
