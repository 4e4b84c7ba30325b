"""Grouping rows into batches of similar length, in an order that depends on nothing but the lengths."""

from __future__ import annotations

from collections.abc import Sequence


def length_batches(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Indices grouped so that rows × longest row ≤ `max_batch_tokens`, shortest rows first; a longer row goes alone.

    Ties are broken by index, so the same lengths always give the same batches.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The number of leading tokens that all rows share; 0 without rows."""
    if not rows:
        return 0
    first, last = min(map(list, rows)), max(map(list, rows))
    shared = 0
    for a, b in zip(first, last, strict=False):
        if a != b:
            break
        shared += 1
    return shared
