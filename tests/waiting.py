"""Waiting in tests for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 120.0, *, every: float = 0.02) -> None:
    """Return once `condition` holds. Raises TimeoutError after `seconds`."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError("it did not happen in time")
        time.sleep(every)
