"""Where rows come from: local files, fsspec URLs and Hub datasets, read record by record without guessing."""

from __future__ import annotations

import csv
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from headwater.core.errors import ConfigError, TransientError

Record = Mapping[str, Any]

_PACKAGE = "package:"
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read at all."""

    reason: str
    detail: str
    raw: str


@dataclass(frozen=True)
class Source:
    """An opened source: its identity and its records in order."""

    name: str
    """How messages call it: a file name, a URL or a Hub id."""
    digest: str
    """Hash of its content (files) or its pinned revision (Hub)."""
    files: tuple[str, ...] = ()
    split: str = "train"

    def records(self) -> Iterator[Record | BadRecord]:
        if not self.files:
            yield from _hub_records(self.name, self.split, self.digest)
        for file in self.files:
            yield from _file_records(file)


def open_source(source: str, *, split: str = "train", revision: str | None = None) -> Source:
    """Find `source` and compute its identity.

    `source` is a local file or folder, an fsspec URL, `package:` plus a path inside Headwater, or a Hub id. Raises
    ConfigError when it is not there or of an unknown format, TransientError when the network is needed and missing.
    """
    if source.startswith(_PACKAGE):
        path = Path(__file__).parent.parent.parent / source.removeprefix(_PACKAGE)
        return _local(path, source)
    if "://" in source:
        _format_of(source)
        return Source(source, _digest((source,)), (source,))
    path = Path(source).expanduser()
    if path.exists():
        return _local(path, path.name)
    if _HUB_ID.match(source) and _format_of(source, strict=False) is None:
        return Source(source, revision or _hub_revision(source), (), split)
    raise ConfigError(
        f"There is no file {source!r}.", todo="Give a path that exists, an fsspec URL, or a Hub dataset id ORG/NAME."
    )


def _local(path: Path, name: str) -> Source:
    if path.is_dir():
        files = sorted(str(p) for p in path.iterdir() if p.is_file() and _format_of(p.name, strict=False))
        if not files:
            raise ConfigError(
                f"The folder {name!r} holds no data file.", todo=f"Known endings: {', '.join(sorted(_FORMATS))}."
            )
    else:
        if not path.is_file():
            raise ConfigError(f"There is no file {name!r}.")
        _format_of(path.name)
        files = [str(path)]
    return Source(name, _digest(tuple(files)), tuple(files))


def _format_of(name: str, *, strict: bool = True) -> str | None:
    suffixes = [s.lower() for s in Path(name.split("?", maxsplit=1)[0]).suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    kind = _FORMATS.get(suffixes[-1]) if suffixes else None
    if kind is None and strict:
        raise ConfigError(
            f"{name!r} has no ending that tells its format.",
            todo=f"Known endings: {', '.join(sorted(_FORMATS))}, each also with {', '.join(_COMPRESSED)}.",
        )
    return kind


@functools.lru_cache(maxsize=64)
def _digest(files: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for file in files:
        with _opened(file, compression=None) as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                total.update(chunk)
    return total.hexdigest()


@contextmanager
def _opened(file: str, compression: str | None = "infer") -> Iterator[IO[bytes]]:
    import fsspec

    try:
        with fsspec.open(file, "rb", compression=compression) as handle:
            yield handle
    except FileNotFoundError as error:
        raise ConfigError(f"There is no file {file!r}.") from error
    except (ValueError, ImportError) as error:
        if "://" not in file:
            raise
        raise ConfigError(
            f"{file!r} cannot be opened: {error}.", todo="Check the URL's protocol and its package."
        ) from error


def _file_records(file: str) -> Iterator[Record | BadRecord]:
    kind = _format_of(file)
    with _opened(file) as handle:
        if kind == "jsonl":
            yield from _jsonl(handle)
        elif kind in ("csv", "tsv"):
            yield from _delimited(handle, "," if kind == "csv" else "\t")
        elif kind == "txt":
            yield from _lines(handle)
        else:
            yield from _columnar(handle, kind or "", file)


def _jsonl(handle: IO[bytes]) -> Iterator[Record | BadRecord]:
    first = True
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            yield from _json_array(line + handle.read())
            return
        first = False
        yield _parsed(line, f"line {number}")


def _json_array(text: bytes) -> Iterator[Record | BadRecord]:
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        yield BadRecord("bad_json", f"the JSON array: {error}", text[:500].decode("utf-8", "replace"))
        return
    for number, value in enumerate(values, 1):
        yield value if isinstance(value, dict) else BadRecord("not_an_object", f"item {number}", str(value)[:500])


def _parsed(line: bytes, where: str) -> Record | BadRecord:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raw = line.decode("utf-8", "replace").rstrip("\n")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as bad:
            return BadRecord("invalid_utf8", f"{where}: byte {bad.start} is not UTF-8", raw)
        return BadRecord("bad_json", f"{where}: {error}", raw)
    if not isinstance(value, dict):
        return BadRecord("not_an_object", f"{where} is not a JSON object", line.decode("utf-8", "replace").rstrip("\n"))
    return value


def _delimited(handle: IO[bytes], delimiter: str) -> Iterator[Record | BadRecord]:
    csv.field_size_limit(1 << 30)
    text = (line.decode("utf-8", "surrogateescape").replace("\x00", "\ufffd") for line in handle)
    for number, row in enumerate(csv.DictReader(text, delimiter=delimiter), 1):
        values = "".join(str(value) for value in row.values())
        if any("\udc80" <= char <= "\udcff" for char in values):
            raw = values.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            yield BadRecord("invalid_utf8", f"row {number} holds a byte that is not UTF-8", raw)
        elif None in row or None in row.values():
            yield BadRecord("wrong_field_count", f"row {number} has more or fewer fields than the header", values)
        else:
            yield row


def _lines(handle: IO[bytes]) -> Iterator[Record | BadRecord]:
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        try:
            yield {"text": line.decode("utf-8").strip()}
        except UnicodeDecodeError as bad:
            yield BadRecord(
                "invalid_utf8", f"line {number}: byte {bad.start} is not UTF-8", line.decode("utf-8", "replace")
            )


def _columnar(handle: IO[bytes], kind: str, file: str) -> Iterator[Record | BadRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = kind == "parquet"
        batches = pq.ParquetFile(handle).iter_batches(batch_size=1_000) if parquet else _arrow_batches(handle)
        for batch in batches:
            yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file!r} is not a readable {kind} file: {error}.", todo="Write it again.") from error


def _arrow_batches(handle: IO[bytes]) -> Iterator[Any]:
    import pyarrow as pa

    start = handle.read(6)
    handle.seek(0)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(handle)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(handle)


def _hub_revision(name: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        return str(HfApi().dataset_info(name).sha)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"The Hub has no dataset {name!r}.", todo="Check the id, or log in if it is private."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise TransientError(
            f"The Hub could not be asked about {name!r}: {type(error).__name__}.",
            todo="Check the network, or pin `revision` in the recipe to use the local cache.",
        ) from error
    except Exception as error:  # the Hub client's own HTTP library has errors outside these trees
        raise TransientError(
            f"The Hub could not be reached for {name!r}: {type(error).__name__}.",
            todo="Check the network, or use a local file.",
        ) from error


def _hub_records(name: str, split: str, revision: str) -> Iterator[Record | BadRecord]:
    import datasets

    try:
        yield from datasets.load_dataset(name, split=split, revision=revision, streaming=True)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConfigError(
            f"The Hub dataset {name!r}, split {split!r}: {error}.", todo="Check id, split and config."
        ) from error
    except OSError as error:
        raise TransientError(
            f"The Hub dataset {name!r} could not be read: {error}.", todo="Check the network."
        ) from error
