"""Records out of a file's bytes, format by format; what cannot be read is a `BadRecord` that names its line."""

from __future__ import annotations

import codecs
import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import orjson

from headwater.core.errors import ConfigError

Record = Mapping[str, Any]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""As JSON escapes it, alone or one of a pair."""


_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte-order marks, those first that begin with another."""
_WIDE_LETTERS = re.compile(rb"[^\0]\0[^\0](?:\0|\Z)|(?:\0[^\0]){2}")
"""How UTF-16 without a mark begins when its first two characters are Latin: a line may end inside the second."""
_AFTER_THE_LAST = "\x00after the last line\x00"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read at all."""

    reason: str
    detail: str
    raw: str


def read_records(handle: IO[bytes], kind: str, name: str) -> Iterator[Record | BadRecord]:
    """The records of an open file called `name`, of the kind jsonl, csv, tsv, txt, parquet or arrow."""
    if kind in ("parquet", "arrow"):
        yield from _columnar(handle, kind, name)
        return
    lines = _utf8_lines(handle, name)
    if kind == "jsonl":
        yield from _jsonl(lines, name)
    elif kind == "txt":
        yield from _lines(lines)
    else:
        yield from _delimited(lines, "," if kind == "csv" else "\t", name)


def one_line(error: BaseException) -> str:
    """What an error of another library says, on one line and without its full stop."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text.rstrip(". ") or type(error).__name__


def _utf8_lines(handle: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines of a text file without the byte-order mark that Excel and Windows put before the first."""
    first = handle.readline()
    encoding = next((wide for mark, wide in _WIDE_MARKS.items() if first.startswith(mark)), None)
    if encoding or _WIDE_LETTERS.match(first):
        raise ConfigError(f"{name!r} looks like {encoding or 'UTF-16'}, and UTF-8 is read.", todo="Save it as UTF-8.")
    return itertools.chain([first.removeprefix(codecs.BOM_UTF8)], handle)


def _jsonl(lines: Iterator[bytes], name: str) -> Iterator[Record | BadRecord]:
    first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            yield from _json_array(line + b"".join(lines))
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


def _delimited(lines: Iterator[bytes], delimiter: str, name: str) -> Iterator[Record | BadRecord]:
    header: list[str] | None = None
    for line, fields in _table(lines, delimiter, name):
        values = "".join(fields)
        if header is None:
            if _has_bad_bytes(values):
                raise ConfigError(
                    f"{name!r}: its first line, the header, is not UTF-8.", todo="Save the file as UTF-8."
                )
            header = fields
        elif _has_bad_bytes(values):
            raw = values.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            yield BadRecord("invalid_utf8", f"line {line} holds a byte that is not UTF-8", raw)
        elif len(fields) != len(header):
            yield BadRecord("wrong_field_count", f"line {line} has more or fewer fields than the header", values)
        else:
            yield dict(zip(header, fields, strict=True))


def _table(lines: Iterator[bytes], delimiter: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of every record that isn't blank, the header first, each with the line on which it begins.

    A quote that nothing closes takes the rest of the file into one field, and `csv` says nothing about it (its strict
    mode also refuses sloppy quotes that do no harm); so a line of our own goes last, and must come back by itself.
    """
    csv.field_size_limit(1 << 30)
    text = (line.decode("utf-8", "surrogateescape") for line in lines)
    reader = csv.reader(itertools.chain(text, [_AFTER_THE_LAST]), delimiter=delimiter)
    begins = 1
    try:
        for fields in reader:
            if fields == [_AFTER_THE_LAST]:
                return
            if fields and fields[-1].endswith(_AFTER_THE_LAST):
                raise ConfigError(
                    f"{name!r}: in the record that begins on line {begins} a quote opens that nothing closes; the rest "
                    "of the file would be one field.",
                    todo="Close that quote; one that is part of the text is written twice, in a field within quotes.",
                )
            if fields:
                yield begins, fields
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"{name!r} can't be read as a table: the line after line {reader.line_num}: {one_line(error)}.",
            todo="Mend that line.",
        ) from error


def _has_bad_bytes(text: str) -> bool:
    return any("\udc80" <= char <= "\udcff" for char in text)


def _lines(lines: Iterator[bytes]) -> Iterator[Record | BadRecord]:
    for number, line in enumerate(lines, 1):
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
            f"{name!r} is not a readable {kind} file: {one_line(error)}.", todo="Fetch or write it again."
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
