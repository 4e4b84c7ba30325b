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
_TELL_TRIES = 2
"""A lock that is free at the second look was held by one who cleared away, not by one who works."""
_open: set[int] = set()


@contextmanager
def file_lock(
    path: Path, *, waiting: Callable[[str], None] | None = None, poll: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for whoever holds it.

    `waiting` is told once who holds it, unless that is over at once; `poll` is called while waiting and may raise to
    give up.
    """
    tries = 0
    while (handle := _acquire(path)) is None:
        tries += 1
        if tries == _TELL_TRIES and waiting is not None:
            waiting(_holder(path))
        if poll is not None:
            poll()
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        _close(handle)


@contextmanager
def free_lock(path: Path) -> Iterator[bool]:
    """Hold the lock on `path` if nobody does, and remove its file when the block ends well; False if somebody does."""
    handle = _acquire(path)
    if handle is None:
        yield False
        return
    try:
        yield True
        path.unlink(missing_ok=True)  # while it is held: whoever opened it meanwhile finds it gone, and opens anew
    finally:
        _close(handle)


def _acquire(path: Path) -> int | None:
    """The handle of the file at `path`, locked; None when somebody else holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _open.add(handle)
        try:
            if not _locked(path, handle):
                _close(handle)
                return None
            if _is_at(path, handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()}".encode(), 0)
                return handle
        except BaseException:
            _close(handle)
            raise
        _close(handle)  # the file was removed between opening and locking it: a lock on it excludes nobody


def _locked(path: Path, handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"The file system of {path.parent} cannot lock files ({error.strerror}).",
            todo="Put the workspace on a local disk (--workspace or HEADWATER_HOME).",
        ) from error
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip() or "another process"
    except OSError:
        return "another process"


def _close(handle: int) -> None:
    if handle in _open:  # else this is a forked child, which closed it at birth
        _open.discard(handle)
        os.close(handle)


def _close_in_child() -> None:
    """A forked worker (of vLLM, of a data loader) that outlives its killed parent must not keep the locks."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
