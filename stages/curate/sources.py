"""Where rows come from: local files, fsspec URLs and Hub datasets, read record by record without guessing."""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from headwater.core.errors import ConfigError, HeadwaterError, TransientError
from headwater.stages.curate.readers import BadRecord, Record, one_line, read_records

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
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_REFUSALS = (*range(400, 408), 410)
_NO_NETWORK = "Check the network, or give a local file: a run needs no network then."


@dataclass(frozen=True, slots=True)
class _HubPart:
    """Which rows of a Hub dataset: many hold several configs, each with splits of its own."""

    commit: str
    split: str
    config: str | None


@dataclass(frozen=True)
class Source:
    """An opened source: its identity and its records in order."""

    name: str
    """How messages call it: a file name, a URL or a Hub id."""
    digest: str
    """Hash of its content (files), or its pinned commit with split and config (Hub): the rows' ids come from it, and
    two splits of one commit hold other rows."""
    files: tuple[str, ...] = ()
    hub: _HubPart | None = None

    def records(self) -> Iterator[Record | BadRecord]:
        if self.hub is not None:
            yield from _hub_records(self.name, self.hub)
        for file in self.files:
            yield from _file_records(file)


def open_source(source: str, *, split: str = "train", revision: str | None = None, config: str | None = None) -> Source:
    """Find `source` and compute its identity.

    `source` is a local file or folder, a pattern of local files, an fsspec URL, `package:` plus a path inside
    Headwater, or a Hub id. Raises ConfigError when it is not there, of an unknown format, or of the kind that has no
    configs, TransientError when the network is needed and missing.
    """
    hub = _hub_id(source)
    if hub is not None:
        commit = revision if revision and _COMMIT.match(revision) else _hub_revision(hub, revision)
        return Source(hub, f"{commit} {split} {config or ''}".rstrip(), (), _HubPart(commit, split, config))
    if config is not None:
        raise ConfigError(
            f"{_shown(source)!r} has no config {config!r} (the recipe's `config`): only datasets of the Hub have "
            "configs, and this is a file, a folder or a URL.",
            todo="Drop `config`, or give a Hub dataset id ORG/NAME.",
        )
    if source.startswith(_PACKAGE):
        path = Path(__file__).parent.parent.parent / source.removeprefix(_PACKAGE)
        return _local(path, source)
    if "://" in source:
        _format_of(_shown(source))
        return Source(_shown(source), _digest((source,)), (source,))
    path = Path(source).expanduser()
    if path.exists():
        return _local(path, path.name)
    if glob.has_magic(source):
        return _matching(source)
    raise ConfigError(
        f"There is no file {source!r}.", todo="Give a path that exists, an fsspec URL, or a Hub dataset id ORG/NAME."
    )


def _hub_id(source: str) -> str | None:
    """ORG/NAME when `source` means a Hub dataset: a file or folder of that name comes first."""
    named = _HUB_ID.match(source)
    if named is None or Path(source).expanduser().exists() or _format_of(source, strict=False) is not None:
        return None
    return named[1]


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
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, FileNotFoundError):
        error = error.__cause__  # fsspec hides the server's answer to a URL with a query: `?` might be a pattern
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
    return one_line(error).replace(file, _shown(file))


def _file_records(file: str) -> Iterator[Record | BadRecord]:
    with _opened(file) as handle:
        yield from read_records(handle, _format_of(file) or "", Path(_shown(file)).name)


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


def _hub_records(name: str, part: _HubPart) -> Iterator[Record | BadRecord]:
    import datasets

    _hub_revision(name, part.commit)  # says at once that there is no network, where `datasets` tries for half a minute
    try:
        yield from datasets.load_dataset(name, name=part.config, split=part.split, revision=part.commit, streaming=True)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        which = f"split {part.split!r}" + (f", config {part.config!r}" if part.config else "")
        raise ConfigError(
            f"The Hub dataset {name!r}, {which}: {_line(error, name)}.",
            todo="Check the id (`source`), `split` and `config` in the recipe.",
        ) from error
    except OSError as error:
        raise TransientError(
            f"The Hub dataset {name!r} could not be read: {_line(error, name)}.", todo=_NO_NETWORK
        ) from error
