"""Where rows come from: local files, fsspec URLs and Hub datasets, read record by record without guessing."""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

import orjson

from headwater.core.errors import ConfigError, HeadwaterError, TransientError

Record = Mapping[str, Any]

_PACKAGE = "package:"
_HUB_ID = re.compile(r"^(?:hf://datasets/)?([\w.-]+/[\w.-]+)/?$")
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
_HUB_TIMEOUT_S = 10
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""As JSON escapes it, alone or one of a pair."""
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_REFUSALS = range(400, 408)
_NO_NETWORK = "Check the network, or give a local file: a run needs no network then."


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

    `source` is a local file or folder, a pattern of local files, an fsspec URL, `package:` plus a path inside
    Headwater, or a Hub id. Raises ConfigError when it is not there or of an unknown format, TransientError when the
    network is needed and missing.
    """
    if source.startswith(_PACKAGE):
        path = Path(__file__).parent.parent.parent / source.removeprefix(_PACKAGE)
        return _local(path, source)
    hub = _HUB_ID.match(source)
    path = Path(source).expanduser()
    if hub and not path.exists() and _format_of(source, strict=False) is None:
        commit = revision if revision and _COMMIT.match(revision) else _hub_revision(hub[1], revision)
        return Source(hub[1], commit, (), split)
    if "://" in source:
        _format_of(_shown(source))
        return Source(_shown(source), _digest((source,)), (source,))
    if path.exists():
        return _local(path, path.name)
    if glob.has_magic(source):
        return _matching(source)
    raise ConfigError(
        f"There is no file {source!r}.", todo="Give a path that exists, an fsspec URL, or a Hub dataset id ORG/NAME."
    )


def _shown(file: str) -> str:
    """A URL without what may be a credential: name and password, query. A local path as it is."""
    if "://" not in file:
        return file
    parts = urlsplit(file)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _matching(pattern: str) -> Source:
    found = glob.glob(str(Path(pattern).expanduser()))  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = sorted(file for file in found if Path(file).is_file())
    if not files:
        raise ConfigError(f"No file matches {pattern!r}.", todo="Check the pattern, or name one file or its folder.")
    for file in files:
        _format_of(Path(file).name)
    return Source(Path(pattern).name, _digest(tuple(files)), tuple(files))


def _local(path: Path, name: str) -> Source:
    if path.is_dir():
        files = sorted(str(p) for p in path.iterdir() if p.is_file() and _format_of(p.name, strict=False))
        if not files:
            raise ConfigError(
                f"The folder {name!r} holds no data file.", todo=f"Known endings: {', '.join(sorted(_FORMATS))}."
            )
    else:
        if not path.is_file():
            raise ConfigError(f"There is no file {name!r}.", todo="Give the path of a data file, or of a folder.")
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
        if compression is not None and _shown(file).lower().endswith(".zst"):
            with fsspec.open(file, "rb", compression=None) as handle:
                yield _unpacked_zst(handle)
        else:
            with fsspec.open(file, "rb", compression=compression) as handle:
                yield handle
    except HeadwaterError:
        raise
    except Exception as error:  # the clients of remote file systems have errors of every kind
        if "://" not in file and not isinstance(error, _READ_ERRORS):
            raise
        raise _unreadable(file, error) from error


def _unpacked_zst(handle: IO[bytes]) -> IO[bytes]:
    """By pyarrow, which is always there; fsspec needs a package of its own for it, and without one reads raw bytes."""
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(handle, "zstd"))


def _unreadable(file: str, error: Exception) -> HeadwaterError:
    name, remote = _shown(file), "://" in file
    status = getattr(error.__cause__, "status", None)
    if status in _REFUSALS:
        return ConfigError(f"{name!r} can't be had: the server answers {status}.", todo="Check the URL.")
    if isinstance(error, FileNotFoundError) and (not remote or error.__cause__ is None):
        return ConfigError(f"There is no file {name!r}.", todo="Check the URL." if remote else "Check the path.")
    if isinstance(error, ImportError | ValueError) and remote:
        return ConfigError(
            f"{name!r} cannot be opened: {_line(error, file)}.", todo="Check the URL's protocol and its package."
        )
    if not remote or isinstance(error, EOFError | zlib.error | gzip.BadGzipFile | lzma.LZMAError):
        return ConfigError(
            f"{name!r} can't be read: {_line(error, file)}.",
            todo="It is damaged, cut off or not of the kind that its ending says: fetch or write it again.",
        )
    return TransientError(f"{name!r} could not be fetched: {_line(error.__cause__ or error, file)}.", todo=_NO_NETWORK)


def _line(error: BaseException, file: str) -> str:
    """What an error of another library says, on one line, without the URL and what it may hold."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text.replace(file, _shown(file)).rstrip(". ") or type(error).__name__


def _file_records(file: str) -> Iterator[Record | BadRecord]:
    kind = _format_of(file)
    with _opened(file) as handle:
        if kind == "jsonl":
            yield from _jsonl(handle, Path(_shown(file)).name)
        elif kind in ("csv", "tsv"):
            yield from _delimited(handle, "," if kind == "csv" else "\t", Path(_shown(file)).name)
        elif kind == "txt":
            yield from _lines(handle)
        else:
            yield from _columnar(handle, kind or "", Path(_shown(file)).name)


def _jsonl(handle: IO[bytes], name: str) -> Iterator[Record | BadRecord]:
    first = True
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            yield from _json_array(line + handle.read())
            return
        if first and line.strip() == b"{":
            raise ConfigError(
                f"{name!r} is JSON over several lines, and not a list.",
                todo="Write one object per line (JSONL), or one list of objects.",
            )
        first = False
        yield _parsed(line, f"line {number}")


def _json_array(text: bytes) -> Iterator[Record | BadRecord]:
    try:
        values = _loads(text)
    except orjson.JSONDecodeError as error:
        yield BadRecord("bad_json", f"the JSON array: {error}", text[:500].decode("utf-8", "replace"))
        return
    for number, value in enumerate(values, 1):
        yield value if isinstance(value, dict) else BadRecord("not_an_object", f"item {number}", str(value)[:500])


def _parsed(line: bytes, where: str) -> Record | BadRecord:
    try:
        value = _loads(line)
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


def _loads(text: bytes) -> Any:
    """The value that the JSON spells, an escaped lone surrogate and all: the row is worth having without it.

    Raises JSONDecodeError for everything that orjson refuses for another reason.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if _SURROGATE.search(text) is not None:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(text.decode("utf-8"), parse_constant=_refuse)
        raise


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _delimited(handle: IO[bytes], delimiter: str, name: str) -> Iterator[Record | BadRecord]:
    csv.field_size_limit(1 << 30)
    text = (line.decode("utf-8", "surrogateescape").replace("\x00", "\ufffd") for line in handle)
    reader = csv.DictReader(text, delimiter=delimiter)
    try:
        if _has_bad_bytes("".join(reader.fieldnames or ())):
            raise ConfigError(f"{name!r}: its first line, the header, is not UTF-8.", todo="Save the file as UTF-8.")
        for row in reader:
            values = "".join(str(value) for value in row.values())
            where = f"line {reader.line_num}"
            if _has_bad_bytes(values):
                raw = values.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                yield BadRecord("invalid_utf8", f"{where} holds a byte that is not UTF-8", raw)
            elif None in row or None in row.values():
                yield BadRecord("wrong_field_count", f"{where} has more or fewer fields than the header", values)
            else:
                yield row
    except csv.Error as error:
        raise ConfigError(
            f"{name!r} can't be read as a table: the line after line {reader.line_num}: {_line(error, name)}.",
            todo="Mend that line.",
        ) from error


def _has_bad_bytes(text: str) -> bool:
    return any("\udc80" <= char <= "\udcff" for char in text)


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


def _columnar(handle: IO[bytes], kind: str, name: str) -> Iterator[Record | BadRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = kind == "parquet"
        batches = pq.ParquetFile(handle).iter_batches(batch_size=1_000) if parquet else _arrow_batches(handle)
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{name!r} is not a readable {kind} file: {_line(error, name)}.", todo="Fetch or write it again."
        ) from error


def _arrow_batches(handle: IO[bytes]) -> Iterator[Any]:
    import pyarrow as pa

    start = handle.read(6)
    handle.seek(0)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(handle)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(handle)


def _hub_revision(name: str, revision: str | None) -> str:
    """The commit that `revision` names now; the newest one when it is None."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    at = f" at revision {revision}" if revision else ""
    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_S).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"The Hub has no dataset {name!r}{at}.", todo="Check the id, or log in if it is private."
        ) from error
    except HfHubHTTPError as error:
        raise TransientError(
            f"The Hub could not be asked about {name!r}: {type(error).__name__}.", todo=_NO_NETWORK
        ) from error
    except Exception as error:  # the Hub client's own HTTP library has errors outside these trees
        raise TransientError(
            f"The Hub can't be reached, and the dataset {name!r} is to come from there ({type(error).__name__}).",
            todo=f"{_NO_NETWORK} There is no local file of that name either.",
        ) from error


def _hub_records(name: str, split: str, revision: str) -> Iterator[Record | BadRecord]:
    import datasets

    _hub_revision(name, revision)  # says at once that there is no network, where `datasets` tries for half a minute
    try:
        yield from datasets.load_dataset(name, split=split, revision=revision, streaming=True)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConfigError(
            f"The Hub dataset {name!r}, split {split!r}: {_line(error, name)}.", todo="Check id, split and config."
        ) from error
    except OSError as error:
        raise TransientError(
            f"The Hub dataset {name!r} could not be read: {_line(error, name)}.", todo=_NO_NETWORK
        ) from error
