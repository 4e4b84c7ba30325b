"""Loading: many formats give the same rows; whatever is unusable is named and refused or rejected."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from headwater.core.errors import ConfigError
from headwater.core.store import StageOutput
from headwater.stages.base import Stage
from headwater.stages.curate.load import Load, LoadConfig

RunStage = Callable[[Stage[Any]], StageOutput]
TEXTS = ["first request", "second, with a comma", 'third "quoted" one', "línea número cuatro"]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def _write(path: Path, kind: str) -> Path:
    rows = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]
    if kind == "jsonl":
        return _jsonl(path.with_suffix(".jsonl"), rows)
    if kind in ("jsonl.gz", "jsonl.zst"):
        target, packing = path.with_suffix(f".{kind}"), "gzip" if kind.endswith("gz") else "zstd"
        with pa.CompressedOutputStream(str(target), packing) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        return target
    if kind == "json":
        target = path.with_suffix(".json")
        target.write_text(json.dumps(rows, indent=1), "utf-8")
        return target
    if kind == "csv":
        target = path.with_suffix(".csv")
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "n"])
            writer.writeheader()
            writer.writerows(rows)
        return target
    if kind == "txt":
        target = path.with_suffix(".txt")
        target.write_text("\n\n".join(TEXTS), "utf-8")
        return target
    target = path.with_suffix(f".{kind}")
    if kind == "parquet":
        pl.DataFrame(rows).write_parquet(target)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return target


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "txt", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, run: RunStage, kind: str) -> None:
    output = run(Load(LoadConfig(source=str(_write(tmp_path / "data", kind)))))
    rows = output.read()
    assert rows["text"].to_list() == TEXTS
    assert rows["messages"].to_list()[0] == [{"role": "user", "content": TEXTS[0]}]
    assert rows["source_row"].to_list() == [0, 1, 2, 3]


def test_the_fingerprint_follows_the_content_not_the_file_name(tmp_path: Path, run: RunStage) -> None:
    first = _jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    second = _jsonl(tmp_path / "b.jsonl", [{"text": "hello"}])
    other = _jsonl(tmp_path / "c.jsonl", [{"text": "goodbye"}])
    paths = [run(Load(LoadConfig(source=str(path)))).path for path in (first, second, other)]
    assert paths[0] == paths[1] != paths[2]


def test_chats_keep_their_roles_and_sharegpt_names_are_understood(tmp_path: Path, run: RunStage) -> None:
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}, {"from": "human", "value": "bye"}]
    output = run(Load(LoadConfig(source=str(_jsonl(tmp_path / "a.jsonl", [{"chat": chat}])), messages="chat")))
    row = output.read().row(0, named=True)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user"]
    assert row["text"] == "hi\nbye"


def test_shuffle_skip_limit_and_where_choose_disjoint_parts_of_one_file(tmp_path: Path, run: RunStage) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": f"row {n}", "class": n % 3} for n in range(60)])
    head = run(Load(LoadConfig(source=str(path), shuffle=True, limit=15))).read()
    rest: dict[str, Any] = {"shuffle": True, "skip": 15, "where": {"class": ["1", "2"]}, "label": "class"}
    tail = run(Load(LoadConfig(source=str(path), **rest))).read()
    assert set(tail["label"]) == {"1", "2"}
    assert len(head) == 15 and len(tail) == 40 - sum(n % 3 != 0 for n in head["source_row"])
    assert not set(head["id"]) & set(tail["id"])
    assert head["source_row"].to_list() != sorted(head["source_row"])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": None}, "null_text"),
        ({"text": 7}, "not_a_string"),
        ({"text": "   "}, "empty_text"),
        ({"text": "x" * 200_000}, "too_long"),
    ],
)
def test_an_unusable_row_is_an_error_that_names_it(
    tmp_path: Path, run: RunStage, row: dict[str, Any], reason: str
) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, row])
    with pytest.raises(ConfigError, match=rf"{reason} in row 1 .*max_reject_share") as caught:
        run(Load(LoadConfig(source=str(path))))
    assert caught.value.exit_code == 2


def test_unusable_rows_below_the_limit_are_rejected_with_their_text(tmp_path: Path, run: RunStage) -> None:
    rows = [{"text": f"fine {n}"} for n in range(9)] + [{"text": 13}]
    output = run(Load(LoadConfig(source=str(_jsonl(tmp_path / "a.jsonl", rows)), max_reject_share=0.1)))
    assert output.manifest["counts"] == {"attempted": 10, "accepted": 9, "rejected": 1, "owed": 0}
    reject = output.rejects().row(0, named=True)
    assert (reject["reason"], reject["raw"]) == ("not_a_string", "13")


def test_invalid_utf8_is_named_in_jsonl_and_csv(tmp_path: Path, run: RunStage) -> None:
    jsonl, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    jsonl.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    table.write_bytes(b"text,n\nfine,1\ncaf\xe9,2\n")
    with pytest.raises(ConfigError, match="invalid_utf8 in line 2"):
        run(Load(LoadConfig(source=str(jsonl))))
    with pytest.raises(ConfigError, match="invalid_utf8 in line 3"):
        run(Load(LoadConfig(source=str(table))))


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('text,n\nfine,1\n"opens,2\nswallowed,3\n', 3),
        ('text,n\n"two\nlines",1\n\nfine,2\n3,"opens\n"", and goes on\n', 6),
        ('text,"n\nfine,1\n', 1),
        ('text,n\nfine,1\nlast,"', 3),
    ],
)
def test_a_quote_that_nothing_closes_is_named_by_the_line_on_which_its_record_begins(
    tmp_path: Path, run: RunStage, table: str, line: int
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(table, "utf-8")
    with pytest.raises(ConfigError, match=rf"begins on line {line} a quote opens that nothing closes"):
        run(Load(LoadConfig(source=str(path), max_reject_share=1.0)))


def test_sloppy_quotes_that_do_no_harm_and_a_missing_last_newline_are_read(tmp_path: Path, run: RunStage) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"abc"def,1\n\nsay "hi",2\n"","3"\n"last ""one""",4', "utf-8")
    output = run(Load(LoadConfig(source=str(path), max_reject_share=0.5)))
    assert output.read()["text"].to_list() == ["abcdef", 'say "hi"', 'last "one"']
    assert output.rejects()["reason"].to_list() == ["empty_text"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_what_cannot_be_stored_is_dropped_and_the_row_flagged_whatever_the_format(
    tmp_path: Path, run: RunStage, name: str
) -> None:
    path = tmp_path / name
    path.write_text(
        "text,n\nnul\0l,1\nfine,2\n" if name == "a.csv" else '{"text": "nul\\u0000l"}\n{"text": "fine"}\n', "utf-8"
    )
    assert run(Load(LoadConfig(source=str(path)))).read().select("text", "cleaned").rows() == [
        ("null", True),
        ("fine", False),
    ]


def test_of_a_long_unusable_row_the_rejects_hold_the_beginning_and_say_so(tmp_path: Path, run: RunStage) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": "x" * 30_000}])
    raw = run(Load(LoadConfig(source=str(path), max_reject_share=0.5))).rejects()["raw"][0]
    assert raw == "x" * 2_000 + "… (28,000 characters more)"


def test_broken_json_is_named(tmp_path: Path, run: RunStage) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n', "utf-8")
    with pytest.raises(ConfigError, match="bad_json in line 2"):
        run(Load(LoadConfig(source=str(path))))


def test_a_wrong_column_name_lists_the_columns(tmp_path: Path, run: RunStage) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"tweet": "hello", "class": 1}])
    with pytest.raises(ConfigError, match=r"no column 'text'.*tweet, class"):
        run(Load(LoadConfig(source=str(path))))
    with pytest.raises(ConfigError, match=r"no column 'kind' \(the recipe's `label`\)"):
        run(Load(LoadConfig(source=str(path), text="tweet", label="kind")))


def test_a_row_without_the_text_column_is_rejected_like_other_unusable_rows(tmp_path: Path, run: RunStage) -> None:
    rows: list[dict[str, Any]] = [{"note": "no text"}, *({"text": f"row {n}"} for n in range(1, 4)), {}]
    source = str(_jsonl(tmp_path / "a.jsonl", rows))
    output = run(Load(LoadConfig(source=source, max_reject_share=0.4)))
    assert output.read()["source_row"].to_list() == [1, 2, 3]
    rejects = output.rejects()
    assert rejects["reason"].to_list() == ["missing_column"] * 2
    assert sorted(rejects["detail"]) == [
        "row 0 (counted from 0): no column 'text'; its columns: note",
        "row 4 (counted from 0): no column 'text'; its columns: none",
    ]
    with pytest.raises(ConfigError, match=r"2 of 5 rows are unusable; the first: missing_column in row 0"):
        run(Load(LoadConfig(source=source, max_reject_share=0.3)))


def test_a_row_without_the_chat_is_rejected_too(tmp_path: Path, run: RunStage) -> None:
    rows: list[dict[str, Any]] = [{"chat": [{"role": "user", "content": "hi"}]}, {"text": "hi"}]
    with pytest.raises(ConfigError, match=r"missing_column in row 1 .*no column 'chat'; its columns: text"):
        run(Load(LoadConfig(source=str(_jsonl(tmp_path / "a.jsonl", rows)), messages="chat")))


def test_a_row_without_a_column_of_where_is_left_out(tmp_path: Path, run: RunStage) -> None:
    rows: list[dict[str, Any]] = [{"text": "a"}, {"text": "b", "kind": "x"}, {"text": "c", "kind": "y"}, {"kind": "y"}]
    output = run(Load(LoadConfig(source=str(_jsonl(tmp_path / "a.jsonl", rows)), where={"kind": ["x"]})))
    assert output.read()["text"].to_list() == ["b"] and output.manifest["counts"]["attempted"] == 1


def test_a_row_whose_label_is_null_or_absent_has_none_rather_than_the_word(tmp_path: Path, run: RunStage) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a"},
        {"text": "b", "kind": "x"},
        {"text": "c", "kind": None},
        {"text": "d", "kind": 0},
    ]
    source = str(_jsonl(tmp_path / "a.jsonl", rows))
    assert run(Load(LoadConfig(source=source, label="kind"))).read()["label"].to_list() == [None, "x", None, "0"]
    chosen = run(Load(LoadConfig(source=source, where={"kind": ["None", "x"]})))
    assert chosen.read()["text"].to_list() == ["b"]


@pytest.mark.parametrize("content", ["", '{"text": "a", "class": 0}\n'])
def test_a_dataset_without_rows_is_refused(tmp_path: Path, run: RunStage, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match="has no rows"):
        run(Load(LoadConfig(source=str(path), where={"class": ["1"]})))


def test_lone_surrogates_and_nuls_are_cleaned_and_flagged(tmp_path: Path, run: RunStage) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "nul \x00 here"}, {"text": "plain"}]), "utf-8")
    rows = run(Load(LoadConfig(source=str(path)))).read()
    assert rows["text"].to_list() == ["nul  here", "plain"]
    assert rows["cleaned"].to_list() == [True, False]


@pytest.mark.parametrize("shape", ["lines", "array"])
def test_an_escaped_lone_surrogate_is_cleaned_and_an_escaped_pair_is_a_character(
    tmp_path: Path, run: RunStage, shape: str
) -> None:
    rows = [
        rb'{"text": "half \ud83d of one, whole \ud83d\ude00", "kind": "k"}',
        rb'{"text": "plain", "kind": "k\udfff"}',
        rb'{"text": "whole \ud83d\ude00", "kind": "k"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(rows) if shape == "lines" else b"[" + b",".join(rows) + b"]")

    loaded = run(Load(LoadConfig(source=str(path), label="kind"))).read()

    assert loaded["text"].to_list() == [
        "half \ufffd of one, whole \N{GRINNING FACE}",
        "plain",
        "whole \N{GRINNING FACE}",
    ]
    assert loaded["label"].to_list() == ["k", "k\ufffd", "k"]
    assert loaded["cleaned"].to_list() == [True, True, False]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (rb'{"text": "\ud800"', "bad_json"),
        (rb'{"text": "\ud800", "n": NaN}', "bad_json"),
        (b'{"text": "\\ud800 caf\xe9"}', "invalid_utf8"),
        (b'{"text": "\\ud800 \xed\xa0\x80"}', "invalid_utf8"),
        (b'{"n": "\\ud800", "text": ' + b"[" * 100_000, "bad_json"),
    ],
)
def test_a_lone_surrogate_excuses_nothing_else(tmp_path: Path, run: RunStage, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"{reason} in line 2"):
        run(Load(LoadConfig(source=str(path))))


def test_real_tweets_load_by_class(run: RunStage) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "davidson_hate_speech.csv.gz"
    if not path.exists():
        pytest.skip("the shared data folder is not beside this checkout")
    output = run(Load(LoadConfig(source=str(path), text="tweet", label="class", where={"class": ["2"]})))
    assert output.rows == 4163
    assert set(output.read()["label"]) == {"2"}


def test_numbers_may_be_written_as_numbers_in_where(tmp_path: Path, run: RunStage) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": f"row {n}", "class": n % 3} for n in range(6)])
    where: Any = {"class": [2]}
    assert run(Load(LoadConfig(source=str(path), where=where))).read()["source_row"].to_list() == [2, 5]
