"""Seeds that follow from what a row is, never from when it ran."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) from the run's seed and whatever identifies the draw (a row id, a sample index).

    Independent of batch order, machine and Python's hash randomisation.
    """
    text = "\x1f".join([str(run_seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
