"""Sources: files, folders, URLs and the Hub are read as they are stored, and named when they are out of reach."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.store import StageOutput
from headwater.stages.base import Stage
from headwater.stages.curate import sources
from headwater.stages.curate.load import Load, LoadConfig

RunStage = Callable[[Stage[Any]], StageOutput]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def _stored(path: Path, text: str, encoding: str) -> str:
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


TEXT_FILES = {
    "a.csv": 'text,kind\n"first, in quotes",one\n',
    "a.tsv": "text\tkind\nfirst, in quotes\tone\n",
    "a.jsonl": '{"text": "first, in quotes"}\n',
    "a.json": '[\n{"text": "first, in quotes"}\n]',
    "a.txt": "first, in quotes\n",
}
TEXT_FILES |= {f"{name}.gz": text for name, text in TEXT_FILES.items()} | {"b.csv": '"text"\n"first, in quotes"\n'}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, run: RunStage, name: str) -> None:
    source = _stored(tmp_path / name, TEXT_FILES[name], "utf-8-sig")
    assert run(Load(LoadConfig(source=source))).read()["text"].to_list() == ["first, in quotes"]


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize(
    ("encoding", "named"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32")],
)
def test_a_file_that_is_not_utf8_but_wider_is_refused_by_the_name_of_its_encoding(
    tmp_path: Path, run: RunStage, name: str, encoding: str, named: str
) -> None:
    source = _stored(tmp_path / name, TEXT_FILES[name], encoding)
    with pytest.raises(ConfigError, match=rf"'{name}' looks like {named}.*Save it as UTF-8"):
        run(Load(LoadConfig(source=source)))


def test_a_missing_file_and_an_unknown_ending_say_what_is_possible(tmp_path: Path, run: RunStage) -> None:
    with pytest.raises(ConfigError, match=r"There is no file.*Hub dataset id"):
        run(Load(LoadConfig(source=str(tmp_path / "nowhere.jsonl"))))
    odd = tmp_path / "data.xyz"
    odd.write_text("hello", "utf-8")
    with pytest.raises(ConfigError, match=r"no ending that tells its format.*\.jsonl"):
        run(Load(LoadConfig(source=str(odd))))


def test_a_folder_of_shards_is_one_dataset(tmp_path: Path, run: RunStage) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for n in range(3):
        pl.DataFrame({"text": [f"row {n}"]}).write_parquet(folder / f"part-{n}.parquet")
    (folder / "README.md").write_text("not data")
    assert run(Load(LoadConfig(source=str(folder)))).read()["text"].to_list() == ["row 0", "row 1", "row 2"]


def test_an_fsspec_url_is_read_like_a_file(run: RunStage) -> None:
    import fsspec

    with fsspec.open("memory://data.jsonl.gz", "wb", compression="gzip") as file:
        file.write(b'{"text": "from memory"}\n')
    assert run(Load(LoadConfig(source="memory://data.jsonl.gz"))).read()["text"].to_list() == ["from memory"]


def test_a_hub_dataset_without_network_says_so(run: RunStage) -> None:
    from headwater.core.errors import TransientError

    with pytest.raises(TransientError, match=r"Hub can't be reached.*Check the network"):
        run(Load(LoadConfig(source="nobody/no-such-dataset")))


@pytest.fixture
def hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset repository with two configs, read by `datasets` from the folder ORG/NAME as if it came from the Hub."""
    folder = tmp_path / "org" / "sums"
    folder.mkdir(parents=True)
    for config in ("main", "socratic"):
        _jsonl(folder / f"{config}.jsonl", [{"text": f"a {config} question"}])
        _jsonl(folder / f"{config}-test.jsonl", [{"text": f"a {config} test"}])
    configs = "".join(
        f"- config_name: {config}\n  data_files:\n  - {{split: train, path: {config}.jsonl}}\n"
        f"  - {{split: test, path: {config}-test.jsonl}}\n"
        for config in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_hub_revision", lambda name, revision: "c0ffee" if revision is None else revision)
    return "hf://datasets/org/sums"


def test_a_hub_dataset_with_several_configs_is_read_by_config_and_split(hub_dataset: str, run: RunStage) -> None:
    parts = [("main", "train"), ("main", "test"), ("socratic", "train")]
    outputs = [run(Load(LoadConfig(source=hub_dataset, config=config, split=split))) for config, split in parts]
    texts = [output.read()["text"].item() for output in outputs]
    assert texts == ["a main question", "a main test", "a socratic question"]
    assert len({output.path for output in outputs}) == len({output.read()["id"].item() for output in outputs}) == 3


@pytest.mark.parametrize(("config", "named"), [(None, "main"), ("mian", "split 'train', config 'mian': .*main")])
def test_a_config_that_is_missing_or_unknown_names_those_there_are(
    hub_dataset: str, run: RunStage, config: str | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{named}.*socratic.*`split` and `config`"):
        run(Load(LoadConfig(source=hub_dataset, config=config)))


def test_a_config_for_a_file_is_refused(tmp_path: Path, run: RunStage) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(ConfigError, match=r"no config 'main' \(the recipe's `config`\).*Drop `config`"):
        run(Load(LoadConfig(source=str(path), config="main")))


def test_a_pattern_reads_the_files_it_matches_in_the_order_of_their_names(tmp_path: Path, run: RunStage) -> None:
    for n in (2, 0, 1):
        _jsonl(tmp_path / f"part-{n}.jsonl", [{"text": f"row {n}"}])
    _jsonl(tmp_path / "other.jsonl", [{"text": "not asked for"}])
    rows = run(Load(LoadConfig(source=str(tmp_path / "part-*.jsonl")))).read()
    assert rows["text"].to_list() == ["row 0", "row 1", "row 2"]


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """The address of a server that answers every request with the status that its path names."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path.split("/")[1]))

        do_HEAD = do_GET  # noqa: N815 - as the base class calls it

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("query", ["", "?download=true"])
@pytest.mark.parametrize(("status", "code"), [(404, 2), (403, 2), (410, 2), (500, 1)])
def test_a_url_with_a_query_fails_as_one_without(
    run: RunStage, refusing_server: str, status: int, code: int, query: str
) -> None:
    url = f"{refusing_server}/{status}/x.jsonl"
    with pytest.raises(HeadwaterError, match=rf"'{re.escape(url)}' .*{status}") as caught:
        run(Load(LoadConfig(source=url + query)))
    assert caught.value.exit_code == code


def test_a_url_is_named_without_what_may_be_a_credential(run: RunStage) -> None:
    with pytest.raises(HeadwaterError, match=r"'http://127\.0\.0\.1:9/x\.jsonl' could not be fetched") as caught:
        run(Load(LoadConfig(source="http://me:geheim@127.0.0.1:9/x.jsonl?token=geheim")))
    assert "geheim" not in str(caught.value)
