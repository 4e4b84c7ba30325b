"""Parquet shards of one declared schema, whose bytes depend on the rows and not on how they were handed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

SHARD_ROWS = 100_000
_GROUP_ROWS = 20_000
_PENDING_BYTES = 64 << 20
"""Rows held back at most; beyond it they are written early, as a smaller row group."""


class ShardWriter:
    """Writes `part-00000.parquet` and so on. There is always one shard, so that empty data keeps its columns."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._writer: Any = None
        self._shards = 0
        self._shard_rows = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Append a table that has exactly the schema."""
        self.rows += table.num_rows
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, _GROUP_ROWS - self._pending_rows)
            at += piece.num_rows
            self._pending.append(piece)
            self._pending_rows += piece.num_rows
            self._pending_bytes += piece.nbytes
            if self._pending_rows == _GROUP_ROWS or self._pending_bytes > _PENDING_BYTES:
                self._write_pending()

    def close(self) -> None:
        """Write what is held back and end the last shard."""
        self._write_pending()
        if self._shards == 0 and self._writer is None:
            self._open()
        self._end_shard()

    def abandon(self) -> None:
        """Give up; what was written stays as it is."""
        self._pending = []
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.is_open = False  # or its destructor would try to end the file, on a disk that may be full
            with suppress(OSError):
                writer.file_handle.close()

    def _write_pending(self) -> None:
        import pyarrow as pa

        if not self._pending_rows:
            return
        rows = pa.concat_tables(self._pending)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        at = 0
        while at < rows.num_rows:
            if self._writer is None:
                self._open()
            piece = rows.slice(at, SHARD_ROWS - self._shard_rows)
            self._writer.write_table(piece, row_group_size=_GROUP_ROWS)
            at += piece.num_rows
            self._shard_rows += piece.num_rows
            if self._shard_rows == SHARD_ROWS:
                self._end_shard()

    def _open(self) -> None:
        import pyarrow.parquet as pq

        path = self._folder / f"part-{self._shards:05d}.parquet"
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def _end_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._shards += 1
            self._shard_rows = 0


def read_frames(files: Sequence[Path], rows: int, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
    """The rows of `files` in frames of at most `rows`, one frame in memory at a time."""
    import polars as pl
    import pyarrow.parquet as pq

    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=rows, columns=None if columns is None else list(columns)):
                frame = pl.from_arrow(batch)
                assert isinstance(frame, pl.DataFrame)
                yield frame
