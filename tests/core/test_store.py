"""An output is published whole or not at all, and believed only if it is what was published."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.core.errors import PermanentError
from headwater.core.fingerprint import Fingerprint
from headwater.core.rows import Reject, row_id, schema
from headwater.core.store import (
    OutputWriter,
    StageOutput,
    disk_errors,
    load_output,
    nearest_difference,
    set_aside_damaged,
)

PRINT = Fingerprint({"stage": "numbers", "config": {"k": 8}})
NUMBERS = schema(n=pa.int64(), text=pa.string())


def _frame(first: int, rows: int) -> pl.DataFrame:
    numbers = range(first, first + rows)
    return pl.DataFrame({"id": [f"{n:032x}" for n in numbers], "n": numbers, "text": [f"row {n}" for n in numbers]})


def _publish(path: Path, *frames: pl.DataFrame, print_: Fingerprint = PRINT, **facts: Any) -> StageOutput:
    out = OutputWriter(path, NUMBERS, "Stage numbers")
    for frame in frames:
        out.write(frame)
    return out.publish(print_, {"node": "numbers", **facts})


def _bytes(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*.parquet"))}


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    out.write(_frame(0, 3))
    out.write_rows([{"id": "a", "n": None, "text": "x"}])
    out.reject([Reject("b", "too_long", "it is long", "the text")])
    out.metrics["share"] = 0.5
    out.artifact("weights.bin").write_bytes(b"abc")
    out.publish(PRINT, {"node": "numbers"})

    output = load_output(tmp_path / "o")
    assert output is not None
    assert output.read()["text"].to_list() == ["row 0", "row 1", "row 2", "x"]
    assert output.rejects().to_dicts() == [{"id": "b", "reason": "too_long", "detail": "it is long", "raw": "the text"}]
    assert output.manifest["counts"] == {"attempted": 5, "accepted": 4, "rejected": 1, "owed": 0}
    assert output.manifest["reasons"] == {"too_long": 1}
    assert output.metrics == {"share": 0.5}
    assert output.artifact("weights.bin").read_bytes() == b"abc"
    assert [frame.height for frame in output.frames(2)] == [2, 2]
    assert [frame.columns for frame in output.frames(9, columns=["n"])] == [["n"]]


def test_nothing_shows_under_the_final_name_before_it_is_published(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    out.write(_frame(0, 3))
    assert load_output(tmp_path / "o") is None
    out.abandon()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_output_of_a_killed_process_is_begun_anew(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, pyarrow as pa\n"
        "from headwater.core.rows import schema\n"
        "from headwater.core.store import OutputWriter\n"
        "out = OutputWriter(pathlib.Path(sys.argv[1]), schema(n=pa.int64(), text=pa.string()), 'Stage numbers')\n"
        "out.write_rows([{'id': 'left over', 'n': 1, 'text': 'x'}])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "o")]).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-o"]
    assert _publish(tmp_path / "o", _frame(0, 2)).read()["n"].to_list() == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def _truncate(path: Path) -> None:
    shard = path / "data" / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    shard = path / "data" / "part-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a truncated shard": _truncate,
    "an edited bit": _flip_a_bit,
    "a missing shard": lambda path: (path / "data" / "part-00000.parquet").unlink(),
    "a stray shard": lambda path: shutil.copy(path / "data/part-00000.parquet", path / "data/part-00001.parquet"),
    "edited metrics": lambda path: (path / "metrics.json").write_text("{}\n\n"),
    "missing rejects": lambda path: shutil.rmtree(path / "rejects"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"files": {'),
    "a manifest of another kind": lambda path: (path / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_output_that_differs_from_its_manifest_is_not_done_and_is_set_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "o"
    _publish(path, _frame(0, 5))
    assert load_output(path) is not None
    DAMAGES[damage](path)
    assert load_output(path) is None
    aside = set_aside_damaged(path)
    assert aside is not None
    assert aside.is_dir()
    assert _publish(path, _frame(0, 5)).rows == 5
    assert load_output(path) is not None


def test_there_is_nothing_to_set_aside_where_nothing_is(tmp_path: Path) -> None:
    assert set_aside_damaged(tmp_path / "o") is None


def test_rows_that_are_not_accounted_for_stop_the_publication(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    out.write(_frame(0, 3))
    out.account(attempted=5, accepted=3)
    with pytest.raises(PermanentError, match="attempted 5 rows but accounts for 3 accepted and 0 rejected"):
        out.publish(PRINT, {})
    assert load_output(tmp_path / "o") is None


def test_two_rows_with_one_id_stop_the_publication(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=f"wrote the id {1:032x} 2 times"):
        _publish(tmp_path / "o", _frame(0, 3), _frame(1, 1))


def test_an_empty_output_has_its_columns(tmp_path: Path) -> None:
    _publish(tmp_path / "o")
    output = load_output(tmp_path / "o")
    assert output is not None
    assert output.read().schema == pl.Schema({"id": pl.String, "n": pl.Int64, "text": pl.String})
    assert output.rejects().columns == ["id", "reason", "detail", "raw"]
    assert output.rows == 0
    assert [frame.height for frame in output.frames()] == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> StageOutput:
    """250,001 rows, among them a first shard whose `text` is null throughout."""
    nulls = [_frame(at, 50_000).with_columns(text=pl.lit(None)) for at in (0, 50_000)]
    return _publish(tmp_path_factory.mktemp("many") / "o", *nulls, _frame(100_000, 150_001))


def test_all_shards_of_a_large_output_share_one_schema(many: StageOutput) -> None:
    shards = [pq.ParquetFile(path) for path in many.data_files]
    assert [shard.metadata.num_rows for shard in shards] == [100_000, 100_000, 50_001]
    assert all(shard.schema_arrow.equals(NUMBERS) for shard in shards)
    assert many.scan().select(pl.col("n").sum()).collect().item() == sum(range(250_001))


def test_the_bytes_follow_from_the_rows_not_from_how_they_were_handed_over(tmp_path: Path) -> None:
    whole = _publish(tmp_path / "a", _frame(0, 130_000))
    pieces = _publish(tmp_path / "b", *(_frame(at, min(777, 130_000 - at)) for at in range(0, 130_000, 777)))
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    assert whole.content_hash == pieces.content_hash
    assert len(_bytes(tmp_path / "a")) == 3


def test_very_long_rows_are_not_held_back(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    for at in range(5):
        out.write_rows([{"id": str(at), "n": at, "text": "x" * 20_000_000}])
    (shard,) = (tmp_path / ".unfinished-o" / "data").iterdir()
    assert shard.stat().st_size > 100
    assert [len(text) for text in out.publish(PRINT, {}).read()["text"]] == [20_000_000] * 5


def test_the_content_hash_covers_rows_and_artifacts_and_nothing_that_varies(tmp_path: Path) -> None:
    def publish(name: str, *, rows: int = 2, artifact: bytes = b"w", metric: float = 1.0) -> str:
        out = OutputWriter(tmp_path / name, NUMBERS, "Stage numbers")
        out.write(_frame(0, rows))
        out.artifact("w").write_bytes(artifact)
        out.metrics["seconds"] = metric
        return out.publish(PRINT, {"started": metric}).content_hash

    first = publish("a")
    assert publish("b", metric=2.0) == first
    assert publish("c", rows=3) != first
    assert publish("d", artifact=b"v") != first


def test_metrics_may_come_from_numpy_and_lack_a_value(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    out.metrics.update(share=np.float32(0.5), count=np.int64(3), sweep=np.arange(2), undefined=float("nan"))
    out.publish(PRINT, {})
    assert json.loads((tmp_path / "o" / "metrics.json").read_text()) == {
        "share": 0.5,
        "count": 3,
        "sweep": [0, 1],
        "undefined": None,
    }


def test_the_output_most_like_it_explains_what_differs_and_of_several_the_newest(tmp_path: Path) -> None:
    made = [("numbers", 8, "a"), ("numbers", 9, "a"), ("numbers", 16, "b"), ("elsewhere", 16, "a")]
    for age, (node, k, of) in enumerate(made):
        path = tmp_path / f"numbers-{node}{k}"
        print_ = Fingerprint({"stage": "numbers", "config": {"k": k, "where": of}, "inputs": {"rows": of}})
        OutputWriter(path, NUMBERS, "Stage numbers").publish(print_, {"node": node})
        os.utime(path / "manifest.json", (1_000 + age, 1_000 + age))
    wanted = Fingerprint({"stage": "numbers", "config": {"k": 16, "where": "a"}, "inputs": {"rows": "a"}})
    assert nearest_difference(tmp_path, "numbers", "numbers", wanted) == ["config.k: 9 → 16"]
    assert nearest_difference(tmp_path, "numbers", "new", wanted) == []
    (tmp_path / "numbers-numbers9" / "manifest.json").write_text('{"node": "numbers"}')
    assert nearest_difference(tmp_path, "numbers", "numbers", wanted) == ["config.k: 8 → 16"]


def test_a_credential_in_a_fingerprint_is_neither_kept_nor_told(tmp_path: Path) -> None:
    path = tmp_path / "numbers-1"
    print_ = Fingerprint({"stage": "numbers", "config": {"extra": {"api_key": "abcsecret99"}, "k": 8}})
    OutputWriter(path, NUMBERS, "Stage numbers").publish(print_, {"node": "numbers"})
    manifest = path / "manifest.json"
    assert "abcsecret99" not in manifest.read_text()

    manifest.write_text(manifest.read_text().replace("[redacted]", "abcsecret99"))  # as it was once written
    told = nearest_difference(tmp_path, "numbers", "numbers", Fingerprint({"stage": "numbers", "config": {"k": 9}}))
    assert told == ['config.extra: {"api_key": "[redacted]"} → (nothing)', "config.k: 8 → 9"]


def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = OutputWriter(tmp_path / "o", NUMBERS, "Stage numbers")
    with pytest.raises(PermanentError, match="Stage numbers produced the columns"):
        out.write(_frame(0, 1).drop("text"))
    assert out.rows == 0


def test_a_full_disk_is_one_error_that_says_so_and_leaves_room_behind(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(4_096)
    _publish(disk / "before", _frame(0, 10))
    out = OutputWriter(disk / "o", NUMBERS, "Stage numbers")
    noise = np.random.default_rng(0).integers(0, 2**62, (400, 20_000))
    full = pytest.raises(PermanentError, match="The disk is full: stage numbers could not be written")
    with full as caught, disk_errors("stage numbers"):
        for batch, numbers in enumerate(noise):
            ids = [row_id("n", [str(batch)], i) for i in range(len(numbers))]
            out.write(pl.DataFrame({"id": ids, "n": numbers, "text": ids}))
    assert "Free some space" in caught.value.todo
    out.abandon()
    assert [path.name for path in disk.iterdir()] == ["before"]
    assert load_output(disk / "before") is not None


def test_only_a_full_disk_is_called_a_full_disk() -> None:
    with pytest.raises(FileNotFoundError), disk_errors("stage numbers"):
        Path("/nowhere/at/all").read_bytes()
