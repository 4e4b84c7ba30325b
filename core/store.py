"""The run store: content-addressed stage outputs.

An output is published in one rename, and believed only if it matches its manifest.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headwater.core.errors import PermanentError
from headwater.core.fingerprint import Fingerprint, canonical_json, differences, sha256_file, sha256_text
from headwater.core.redact import redact_values
from headwater.core.rows import REJECT_SCHEMA, Reject, conform, table_of
from headwater.core.shards import ShardWriter, read_frames

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

_MANIFEST = "manifest.json"
UNFINISHED, DAMAGED, FAILED = ".unfinished-", ".damaged-", ".failed-"
"""What the names of folders beside the outputs begin with; `core/sweep.py` clears them away."""


@dataclass(frozen=True)
class Workspace:
    """The folders of a workspace (`.headwater/` by default)."""

    root: Path

    @property
    def stages(self) -> Path:
        return self.root / "stages"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    def output_path(self, stage: str, fingerprint: Fingerprint) -> Path:
        return self.stages / f"{stage}-{fingerprint.digest}"

    def journal_path(self, stage: str, fingerprint: Fingerprint) -> Path:
        return self.stages / ".journals" / f"{stage}-{fingerprint.digest}.sqlite"

    def lock_path(self, stage: str, fingerprint: Fingerprint) -> Path:
        return self.stages / ".locks" / f"{stage}-{fingerprint.digest}"


class StageOutput:
    """A finished stage output, read lazily."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def rows(self) -> int:
        """Rows written. A stage may write several rows for one it attempted."""
        return int(self.manifest["rows"])

    @property
    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = json.loads((self.path / "metrics.json").read_text("utf-8"))
        return metrics

    @property
    def content_hash(self) -> str:
        """Hash of the rows and artifacts: what a stage that reads this output depends on."""
        return str(self.manifest["content_hash"])

    @property
    def data_files(self) -> list[Path]:
        """The shards the manifest knows, in order."""
        return self._files("data/")

    def scan(self) -> pl.LazyFrame:
        """All rows as a lazy polars frame, in the order they were written."""
        import polars as pl

        return pl.scan_parquet(self.data_files)

    def read(self) -> pl.DataFrame:
        """All rows at once; for outputs known to be small."""
        return self.scan().collect()

    def frames(self, rows: int = 10_000, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """The rows in frames of at most `rows`, one frame in memory at a time; only `columns` of them if given."""
        yield from read_frames(self.data_files, rows, columns)

    def rejects(self) -> pl.DataFrame:
        import polars as pl

        return pl.read_parquet(self._files("rejects/"))

    def artifact(self, name: str) -> Path:
        return self.path / "artifacts" / name

    def _files(self, folder: str) -> list[Path]:
        return [self.path / name for name in sorted(self.manifest["files"]) if name.startswith(folder)]


def load_output(path: Path) -> StageOutput | None:
    """The output at `path` if its manifest matches its files byte for byte, none missing and none added; else None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text("utf-8"))
        if {str(file.relative_to(path)) for file in _files(path)} != {*manifest["files"], _MANIFEST}:
            return None
        for name, facts in manifest["files"].items():
            file = path / name
            if file.stat().st_size != facts["bytes"] or sha256_file(file) != facts["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StageOutput(path, manifest)


def set_aside_damaged(path: Path) -> Path | None:
    """Rename an output that does not match its manifest, so that it can be looked at; None when there is none."""
    if not path.exists():
        return None
    aside = path.with_name(f"{DAMAGED}{path.name}-{time.time_ns()}")
    path.rename(aside)
    return aside


def nearest_difference(stages: Path, stage: str, node: str, fingerprint: Fingerprint) -> list[str]:
    """Why no earlier output of the same node can be reused: the parts in which the one most like it differs.

    Of several that are as like, the newest; other pipelines in the workspace have nodes of the same names. Empty when
    there is no earlier output.
    """
    found: list[tuple[int, float, list[str]]] = []
    for path in stages.glob(f"{stage}-*/{_MANIFEST}"):
        try:
            manifest, made = json.loads(path.read_text("utf-8")), path.stat().st_mtime
            if manifest["node"] == node:
                differing = differences(_explained(manifest["fingerprint"]), _explained(fingerprint.as_json()))
                found.append((len(differing), -made, differing))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # what is no manifest of ours explains nothing
    return min(found, default=(0, 0.0, []))[2]


def _explained(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Without credentials, which a manifest may hold that was written before they were refused."""
    return {"scheme": fingerprint.get("scheme"), **redact_values(fingerprint["parts"])}


class OutputWriter:
    """Writes one stage output under a temporary name; `publish` makes it real in one rename.

    Counts are kept while writing: `attempted` must equal accepted plus rejected when it is published.
    """

    def __init__(self, final: Path, schema: pa.Schema, where: str) -> None:
        self.final = final
        self.schema = schema
        self.metrics: dict[str, Any] = {}
        self._account: tuple[int, int] | None = None
        self._where = where
        self._temporary = final.with_name(f"{UNFINISHED}{final.name}")
        shutil.rmtree(self._temporary, ignore_errors=True)
        for folder in ("data", "rejects", "artifacts"):
            (self._temporary / folder).mkdir(parents=True)
        self._data = ShardWriter(self._temporary / "data", schema)
        self._rejects = ShardWriter(self._temporary / "rejects", REJECT_SCHEMA)
        self.reasons: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return self._data.rows

    @property
    def accepted(self) -> int:
        """Attempted rows that became data: the rows written, unless the stage accounted for them otherwise."""
        return self.rows if self._account is None else self._account[1]

    @property
    def attempted(self) -> int:
        return self.rows + self.rejected if self._account is None else self._account[0]

    def account(self, *, attempted: int, accepted: int) -> None:
        """State how many rows were attempted and accepted, when a row in is not just one row out."""
        self._account = (attempted, accepted)

    @property
    def rejected(self) -> int:
        return self._rejects.rows

    def write(self, frame: pl.DataFrame) -> None:
        """Append accepted rows."""
        if frame.height:
            self._data.write(conform(frame, self.schema, self._where))

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append accepted rows given as mappings with exactly the declared columns."""
        if rows:
            self._data.write(table_of(rows, self.schema, self._where))

    def reject(self, rejects: Sequence[Reject]) -> None:
        """Append rejected rows with their reasons."""
        for reject in rejects:
            self.reasons[reject.reason] = self.reasons.get(reject.reason, 0) + 1
        if rejects:
            self._rejects.write(table_of([reject.as_row() for reject in rejects], REJECT_SCHEMA, self._where))

    def artifact(self, name: str) -> Path:
        """Where to write an artifact file or folder."""
        return self._temporary / "artifacts" / name

    def publish(self, fingerprint: Fingerprint, facts: Mapping[str, Any]) -> StageOutput:
        """Write metrics and manifest, fsync everything, and rename to the final name."""
        if self.attempted != self.accepted + self.rejected:
            raise PermanentError(
                f"{self._where} attempted {self.attempted:,} rows but accounts for {self.accepted:,} accepted and "
                f"{self.rejected:,} rejected.",
                todo="Every row must be written or rejected with a reason; this is a fault of the stage.",
            )
        self._data.close()
        self._rejects.close()
        self._check_ids()
        _write_json(self._temporary / "metrics.json", self.metrics)
        files = {str(path.relative_to(self._temporary)): _facts(path) for path in _files(self._temporary)}
        content = {name: fact["sha256"] for name, fact in files.items() if name.startswith(("data/", "artifacts/"))}
        manifest = {
            **facts,
            "fingerprint": fingerprint.as_json(),
            "rows": self.rows,
            "counts": {"attempted": self.attempted, "accepted": self.accepted, "rejected": self.rejected, "owed": 0},
            "reasons": dict(sorted(self.reasons.items())),
            "schema": {field.name: str(field.type) for field in self.schema},
            "content_hash": sha256_text(canonical_json(content)),
            "files": files,
        }
        _write_json(self._temporary / _MANIFEST, manifest)
        _sync_tree(self._temporary)
        self._temporary.rename(self.final)
        _sync_folder(self.final.parent)
        return StageOutput(self.final, manifest)

    def abandon(self) -> None:
        """Remove what was written so far (a table stage begins anew; a row stage has its journal)."""
        self._data.abandon()
        self._rejects.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def keep_rejects(self) -> Path:
        """Keep the rejected rows of an output that is not to be published, to be looked at; returns their folder."""
        self._rejects.close()
        kept = self.final.with_name(f"{FAILED}{self.final.name}")
        shutil.rmtree(kept, ignore_errors=True)
        (self._temporary / "rejects").rename(kept)
        return kept

    def _check_ids(self) -> None:
        """Every row has an id of its own: a stage that reads this output keeps its journal by it."""
        import polars as pl

        if "id" not in self.schema.names:
            return
        ids = pl.scan_parquet(sorted((self._temporary / "data").glob("*.parquet"))).select("id")
        twice = ids.group_by("id").len().filter(pl.col("len") > 1).sort("id").head(1).collect(engine="streaming")
        if twice.height:
            raise PermanentError(
                f"{self._where} wrote the id {twice['id'][0]} {twice['len'][0]} times.",
                todo="Give every row an id of its own with core.rows.row_id (stage, parent ids, sample index).",
            )


@contextmanager
def disk_errors(where: str) -> Iterator[None]:
    """Turn a full disk into an error that says so; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PermanentError(
                f"The disk is full: {where} could not be written ({error.filename or 'no file named'}).",
                todo="Free some space and run again; everything finished before this is kept.",
            ) from error
        raise


@functools.cache
def library_versions() -> dict[str, str]:
    """Versions of what shapes a stage output; recorded in every manifest, not part of the fingerprint."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("headwater", "polars", "pyarrow", "torch", "transformers", "sae-lens", "datatrove", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented, sorted keys; numpy numbers are numbers, not-a-number and infinities are null."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    path.write_bytes(orjson.dumps(value, option=options | orjson.OPT_APPEND_NEWLINE))


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        facts["rows"] = pq.read_metadata(path).num_rows
    return facts


def _sync_tree(root: Path) -> None:
    for path in _files(root):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for folder in sorted({root, *(path for path in root.rglob("*") if path.is_dir())}):
        _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
