"""The sparse activation table of a dataset: which features each row fires, how strongly and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl

ENTRIES_PER_BLOCK = 1 << 22
"""Entries looked at together, so that temporaries stay at tens of megabytes for a table of any size."""


Number = TypeVar("Number", bound=np.generic)


class PooledRow(Protocol):
    """One row as feature extraction yields it."""

    @property
    def row(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def features(self) -> NDArray[np.int32]: ...
    @property
    def values(self) -> NDArray[np.float32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Max-pooled activations g_i(x) of every row x, compressed by rows: row r owns entries indptr[r] to indptr[r + 1].

    An absent entry means 0. Raises ConfigError, naming the row, when the arrays contradict one another.
    """

    indptr: NDArray[np.int64]
    """Shape (rows + 1,), starts at 0."""
    features: NDArray[np.int32]
    """Shape (entries,), strictly ascending within a row, below `width`."""
    values: NDArray[np.float32]
    """Shape (entries,), the largest activation of the feature over the row's own tokens, not negative."""
    positions: NDArray[np.int32]
    """Shape (entries,), index of the peak among the row's own tokens."""
    n_tokens: NDArray[np.int32]
    """Shape (rows,), number of own tokens."""
    width: int
    """How many features the space has."""

    def __post_init__(self) -> None:
        _check_shapes(self)
        for block in entry_blocks(self.n_entries):
            _check_entries(self, block)

    @property
    def n_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_entries(self) -> int:
        return len(self.features)

    @classmethod
    def from_frame(cls, frame: pl.DataFrame, width: int) -> Activations:
        """From the columns `n_tokens`, and the lists `features`, `values`, `positions` (see `to_frame`)."""
        n_tokens = frame["n_tokens"].to_numpy()
        lists = {name: _flat_list(frame, name, kind) for name, kind in _LISTS.items()}
        indptr, features = lists["features"]
        for name in ("values", "positions"):
            differs = np.flatnonzero(np.diff(lists[name][0]) != np.diff(indptr))
            if differs.size:
                raise ConfigError(
                    f"Row {differs[0]}: `{name}` and `features` have different lengths.",
                    todo="Extract the features again: this table is damaged.",
                )
        return cls(
            indptr,
            features.astype(np.int32, copy=False),
            lists["values"][1].astype(np.float32, copy=False),
            lists["positions"][1].astype(np.int32, copy=False),
            n_tokens.astype(np.int32, copy=False),
            width,
        )

    @classmethod
    def from_rows(cls, rows: Iterable[PooledRow], width: int) -> Activations:
        """From extracted rows in any order; they must be numbered 0 to n - 1 without a gap."""
        ordered = sorted(rows, key=lambda pooled: pooled.row)
        for expected, pooled in enumerate(ordered):
            if pooled.row != expected:
                raise ConfigError(
                    f"Row {expected} has no activations, or another row has them twice (found row {pooled.row}).",
                    todo="Number the rows from 0 without gaps.",
                )
        lengths = np.array([len(pooled.features) for pooled in ordered], dtype=np.int64)
        return cls(
            _offsets(lengths),
            _joined([pooled.features for pooled in ordered], np.int32),
            _joined([pooled.values for pooled in ordered], np.float32),
            _joined([pooled.positions for pooled in ordered], np.int32),
            np.array([pooled.n_tokens for pooled in ordered], dtype=np.int32),
            width,
        )

    def to_frame(self) -> pl.DataFrame:
        """Columns `n_tokens` (i32), `features` (list[i32]), `values` (list[f32]), `positions` (list[i32])."""
        import polars as pl
        import pyarrow as pa

        columns: dict[str, pl.Series] = {"n_tokens": pl.Series(self.n_tokens)}
        for name in _LISTS:
            lists = pa.LargeListArray.from_arrays(pa.array(self.indptr), pa.array(getattr(self, name)))
            columns[name] = pl.Series(pl.from_arrow(lists))
        return pl.DataFrame(columns)

    def take(self, rows: NDArray[np.int64] | Sequence[int]) -> Activations:
        """The rows with these indices, in this order, repeats allowed."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = np.diff(self.indptr)[rows]
        indptr = _offsets(lengths)
        entries = np.arange(indptr[-1]) + np.repeat(self.indptr[rows] - indptr[:-1], lengths)
        return Activations(
            indptr,
            self.features[entries],
            self.values[entries],
            self.positions[entries],
            self.n_tokens[rows],
            self.width,
        )

    def rows_of(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row each of these entries belongs to."""
        return np.searchsorted(self.indptr, entries, side="right") - 1


def concatenate(first: Activations, second: Activations) -> Activations:
    """The rows of `first`, then those of `second`. Raises ConfigError when the widths differ."""
    check_same_space(first, second)
    return Activations(
        np.concatenate([first.indptr, second.indptr[1:] + first.n_entries]),
        np.concatenate([first.features, second.features]),
        np.concatenate([first.values, second.values]),
        np.concatenate([first.positions, second.positions]),
        np.concatenate([first.n_tokens, second.n_tokens]),
        first.width,
    )


def check_same_space(first: Activations, second: Activations) -> None:
    if first.width != second.width:
        raise ConfigError(
            f"Two activation tables come from different feature spaces: widths {first.width} and {second.width}.",
            todo="Extract both datasets with the same SAE.",
        )


def entry_blocks(n_entries: int) -> Iterator[slice]:
    """Slices that cover all entries, ENTRIES_PER_BLOCK at a time."""
    for start in range(0, n_entries, ENTRIES_PER_BLOCK):
        yield slice(start, min(start + ENTRIES_PER_BLOCK, n_entries))


_LISTS = {"features": "i", "values": "f", "positions": "i"}
"""The list columns with the kind of number each holds."""


def _check_shapes(table: Activations) -> None:
    sizes = {len(table.features), len(table.values), len(table.positions)}
    rows = len(table.n_tokens)
    if len(sizes) != 1 or len(table.indptr) != rows + 1 or table.indptr[0] != 0 or table.indptr[-1] not in sizes:
        raise ConfigError(
            f"An activation table of {rows} rows has {len(table.indptr)} row bounds and arrays of {sorted(sizes)} "
            "entries.",
            todo="Extract the features again: this table is damaged.",
        )
    if rows and np.diff(table.indptr).min() < 0:
        row = int(np.argmax(np.diff(table.indptr) < 0))
        raise ConfigError(f"Row {row} ends before it begins.", todo="Extract the features again.")


def _check_entries(table: Activations, block: slice) -> None:
    features, values = table.features[block], table.values[block]
    # Two neighbours must ascend unless the second one begins a row.
    unordered = np.zeros(len(features), dtype=np.bool_)
    before = table.features[max(block.start - 1, 0) : block.stop - 1]
    unordered[len(features) - len(before) :] = features[len(features) - len(before) :] <= before
    low, high = np.searchsorted(table.indptr, [block.start, block.stop])
    starts = table.indptr[low:high] - block.start
    unordered[starts[starts < len(features)]] = False
    for wrong, what in (
        (unordered, "lists a feature twice or out of order"),
        ((features < 0) | (features >= table.width), f"names a feature outside 0 to {table.width - 1}"),
        (~(np.isfinite(values) & (values >= 0)), "has an activation that is negative or not a number"),
    ):
        if wrong.any():
            row = int(table.rows_of(np.array([block.start + int(np.argmax(wrong))]))[0])
            raise ConfigError(f"Row {row} {what}.", todo="Extract the features again with the SAE in use.")


def _flat_list(frame: pl.DataFrame, name: str, kind: str) -> tuple[NDArray[np.int64], NDArray[np.generic]]:
    column = frame[name]
    if column.null_count():
        row = int(np.argmax(column.is_null().to_numpy()))
        raise ConfigError(f"Row {row}: `{name}` is null.", todo="Extract the features again: this table is damaged.")
    lists = column.rechunk().to_arrow()
    flat = lists.flatten()
    if flat.null_count:
        raise ConfigError(f"`{name}` holds nulls.", todo="Extract the features again: this table is damaged.")
    numbers: NDArray[np.generic] = flat.to_numpy()
    if len(numbers) and numbers.dtype.kind != kind:
        raise ConfigError(f"`{name}` holds {numbers.dtype} where another type belongs.", todo="Extract again.")
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, dtype=np.int64), numbers


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _joined(parts: list[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)
