"""Bad input at the command line: one paragraph that names the key or the row, exit code 2, and nothing is left half."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.pipelines.cli import main

GOOD = [{"text": f"Write poem number {n} about the sea."} for n in range(5)]


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _chat(*messages: Any) -> bytes:
    return _lines([{"chat": [{"role": "user", "content": "hello"}]}, {"chat": list(messages)}])


PACKED = gzip.compress(_lines(GOOD * 500), mtime=0)
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w"}}]}
USER = {"role": "user", "content": "weather?"}

BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "an empty file": ("a.jsonl", b"", "'a.jsonl' has no rows"),
    "a header only": ("a.csv", b"text,kind\n", "'a.csv' has no rows"),
    "an empty list": ("a.json", b"[]", "'a.json' has no rows"),
    "null": ("a.jsonl", _lines([*GOOD, {"text": None}]), "null_text in row 5"),
    "a number": ("a.jsonl", _lines([*GOOD, {"text": 7}]), "row 5 (counted from 0): the text is a number"),
    "a list": ("a.jsonl", _lines([*GOOD, {"text": ["a"]}]), "row 5 (counted from 0): the text is a list"),
    "a huge text": ("a.jsonl", _lines([{"text": "x " * 100_000}]), "row 0 (counted from 0): 200,000 characters"),
    "white space": ("a.jsonl", _lines([{"text": " \t\n"}]), "empty_text in row 0"),
    "a NUL alone": ("a.jsonl", _lines([{"text": "\0"}]), "empty_text in row 0"),
    "invalid UTF-8": ("a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n', "invalid_utf8 in line 2: byte 13"),
    "invalid UTF-8 in CSV": ("a.csv", b"text,n\nfine,1\ncaf\xe9,2\n", "invalid_utf8 in line 3"),
    "a header in Latin-1": ("a.csv", b"t\xe9xt,n\nfine,1\n", "the header, is not UTF-8"),
    "a broken line": ("a.jsonl", b'{"text": "fine"}\n{"text": "no end\n', "bad_json in line 2"),
    "one object over lines": ("a.json", b'{\n "data": []\n}\n', "one object per line"),
    "too many fields": ("a.csv", b"text,n\nfine,1\nmore,2,3\n", "wrong_field_count in line 3"),
    "bare carriage returns": ("a.csv", b"text,n\rfine,1\r", "can't be read as a table"),
    "a column that a row lacks": ("a.jsonl", _lines([*GOOD, {"txet": "x"}]), "missing_column in row 5"),
    "a column that no row has": ("a.jsonl", _lines([{"txet": "x"}]), "no column 'text' (the recipe's `text`) in"),
    "UTF-16": ("a.csv", "text,n\nfine,1\n".encode("utf-16"), "'a.csv' looks like UTF-16"),
    "half a gzip": ("a.jsonl.gz", PACKED[: len(PACKED) // 2], "can't be read: Compressed file ended"),
    "a gzip with a wrong sum": ("a.jsonl.gz", PACKED[:-8] + bytes(8), "can't be read: CRC check failed"),
    "no gzip": ("a.jsonl.gz", _lines(GOOD), "can't be read: Not a gzipped file"),
    "no zstd": ("a.jsonl.zst", _lines(GOOD), "can't be read: ZSTD"),
    "no xz": ("a.jsonl.xz", _lines(GOOD), "can't be read: Input format not supported"),
    "no Parquet": ("a.parquet", b"no parquet " * 20, "'a.parquet' is not a readable parquet file"),
    "no Arrow": ("a.arrow", b"", "'a.arrow' is not a readable arrow file"),
    "an unknown ending": ("a.xlsx", b"x", "no ending that tells its format"),
}
BAD_CHATS: dict[str, tuple[bytes, str]] = {
    "an unknown role": (_chat({"role": "wizard", "content": "x"}), "has the role 'wizard'; read are user"),
    "no role": (_chat({"content": "x"}), "message 0 of the chat has no role"),
    "tool calls": (_chat(USER, TOOL_CALL), "message 1 of the chat calls a tool"),
    "no user": (_chat({"role": "assistant", "content": "x"}), "no_user_turn in row 1"),
    "content in parts": (_chat({"role": "user", "content": [{"type": "text"}]}), "has a list for content"),
    "an empty chat": (_chat(), "the chat is empty"),
    "text for a chat": (_lines([{"chat": "user: hi"}]), "the chat is text"),
}


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


RunRecipe = Callable[[dict[str, Any]], "Ran"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "good.jsonl").write_bytes(_lines(GOOD))
    source = {"source": str(tmp_path / "good.jsonl")}
    return {"flow": "fac-synthesis", "anchor": source, "seed_data": source, "measure": {"layer": 8}}


class Ran:
    """`pipeline run --direct` of a recipe in this process: its code, and the last line that a person sees."""

    def __init__(self, capsys: pytest.CaptureFixture[str], workspace: Path, recipe: dict[str, Any], *more: str) -> None:
        path = workspace / "bad.yaml"
        path.write_text(yaml.safe_dump(recipe))
        with pytest.raises(SystemExit) as ended:
            main(("--workspace", str(workspace), "run", "--direct", "-c", str(path), *more))
        self.code = ended.value.code
        self.all = capsys.readouterr().err
        self.complaint = self.all.splitlines()[-1]
        assert self.complaint.startswith("Error: ")
        assert "Traceback" not in self.all


@pytest.fixture
def run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> RunRecipe:
    return lambda recipe: Ran(capsys, workspace, recipe)


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_exit_code_2_and_named(
    case: str, tmp_path: Path, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, what = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    ran = Ran(capsys, workspace, {**recipe, "anchor": {"source": str(tmp_path / name)}})
    assert ran.code == 2
    assert name in ran.complaint
    assert what in ran.complaint


@pytest.mark.parametrize("case", BAD_CHATS)
def test_a_bad_chat_is_exit_code_2_and_named_with_its_message(
    case: str, tmp_path: Path, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    content, what = BAD_CHATS[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    ran = Ran(capsys, workspace, {**recipe, "anchor": {"source": str(tmp_path / "a.jsonl"), "messages": "chat"}})
    assert ran.code == 2
    assert what in ran.complaint


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        ("nowhere-*.jsonl", 2, "No file matches"),
        ("nowhere.jsonl", 2, "There is no file"),
        ("s3://bucket/x.jsonl", 2, "Check the URL's protocol and its package"),
        ("http://127.0.0.1:9/x.jsonl", 1, "could not be fetched"),
        ("nobody/no-such-dataset", 1, "The Hub can't be reached"),
        ("hf://datasets/nobody/no-such-dataset", 1, "The Hub can't be reached"),
    ],
)
def test_a_source_out_of_reach_says_so_at_once(
    source: str, code: int, what: str, run: RunRecipe, recipe: dict[str, Any]
) -> None:
    ran = run({**recipe, "anchor": {"source": source}})
    assert (ran.code, what in ran.complaint) == (code, True), ran.complaint


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed_data": {"source": "nowhere.jsonl"}}, "Stage seed (the recipe's `seed_data`): There is no file"),
        ({"measure": {"layer": 99}}, "Stage space (the recipe's `measure` and `sae.train`): There is no layer 99"),
        (
            {"sae": {"load": {"source": "nowhere"}}},
            "Stage space (the recipe's `measure` and `sae.load`): nowhere is neither a path",
        ),
        (
            {"measure": {"model": {"engine": "transformers", "model": "nowhere"}}},
            "Stage space (the recipe's `measure` and `sae.train`): ",
        ),
    ],
)
def test_a_value_found_wrong_by_a_stage_is_told_with_the_keys_to_look_at(
    change: dict[str, Any], told: str, run: RunRecipe, recipe: dict[str, Any]
) -> None:
    ran = run(recipe | change)
    assert ran.code == 2
    assert told in ran.complaint


BAD_VALUES = {
    "missing.delta": -1,
    "missing.delta_quantile": 1.5,
    "missing.alpha": 7,
    "missing.min_support": -1,
    "missing.limit": 0,
    "synthesis.candidates": 0,
    "synthesis.generations": 0,
    "synthesis.max_reject_share": 3,
    "reply.max_reject_share": -1,
    "coverage.sweep": "[2]",
    "anchor.limit": 0,
    "anchor.skip": 10**19,
    "anchor.max_characters": "true",
    "seed": 10**26,
    "synthesis.examples": 10**20,
    "judge.settings.limit": 10**20,
    "sae.train.width": 2**31,
    "reply.sampling.max_tokens": "true",
    "reply.engine.attempts": "true",
    "prices.some.input": "true",
    "anchor.source": "''",
    "synthesis.engine": "{engine: openai, model: x}",
    "dataset.license": "My Own Licence",
    "dataset.language": "[english]",
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_value_out_of_range_is_named_by_its_key(
    key: str, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, workspace, recipe, "--set", f"{key}={BAD_VALUES[key]}")
    assert ran.code == 2
    assert f"Key '{key}" in ran.complaint


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ({"base_url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}, "The environment variable NO_SUCH_KEY"),
        ({"base_url": "localhost:9"}, "base_url is no http(s) URL"),
    ],
)
def test_a_server_that_cannot_be_asked_is_named_before_the_first_stage(
    engine: dict[str, Any], what: str, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, workspace, {**recipe, "reply": {"engine": {"engine": "openai", "model": "x", **engine}}})
    assert ran.code == 2
    assert what in ran.complaint
    assert "started" not in ran.all


def test_an_empty_mapping_takes_a_filter_away(
    tmp_path: Path, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(_lines([*GOOD, {"text": None}]))
    anchor = {"source": str(tmp_path / "a.jsonl"), "where": {"kind": ["poem"]}}
    filtered = Ran(capsys, workspace, {**recipe, "anchor": anchor})
    cleared = Ran(capsys, workspace, {**recipe, "anchor": anchor}, "--set", "anchor.where={}")
    assert "no column 'kind' (the recipe's `where`)" in filtered.complaint
    assert "null_text in row 5" in cleared.complaint


def test_a_model_with_pickled_weights_is_refused_and_not_opened(
    tmp_path: Path, workspace: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, mark = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(mark)))
    ran = Ran(capsys, workspace, recipe | {"measure": {"model": {"engine": "transformers", "model": str(model)}}})
    assert ran.code == 2
    assert "only pickled weights (pytorch_model.bin)" in ran.complaint
    assert not mark.exists()
