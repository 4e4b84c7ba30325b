"""Seeds that follow from what a row is, never from when it ran."""

from __future__ import annotations

from headwater.core.fingerprint import canonical_json, sha256_text


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) from the run's seed and whatever identifies the draw (a row id, a sample index).

    Independent of batch order, machine and Python's hash randomisation.
    """
    return int(sha256_text(canonical_json([run_seed, *map(str, parts)]))[:16], 16) >> 1
