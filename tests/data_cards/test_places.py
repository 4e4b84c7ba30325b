"""What a card may show of where things lay: names that mean something elsewhere, and no folder of its author's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from card_samples import make_card

from headwater.data_cards.card import render_card
from headwater.data_cards.places import public_name, without_places

SHA = "0123456789abcdef0123456789abcdef01234567"

LOCAL = {
    "/home/ada/data/anchor.jsonl": "anchor.jsonl",
    "/home/ada/my data/anchor one.jsonl": "anchor one.jsonl",
    "/tmp/rvB/": "rvB",
    "~/secret/seed.csv.gz": "seed.csv.gz",
    "~ada/seed.csv": "seed.csv",
    "./anchor.jsonl": "anchor.jsonl",
    "../shared/data/part-*.jsonl": "part-*.jsonl",
    "private/anchor.jsonl": "anchor.jsonl",
    "private/sub/anchor.parquet": "anchor.parquet",
    "file:///home/ada/anchor.jsonl": "anchor.jsonl",
    "file:/home/ada/anchor.jsonl": "anchor.jsonl",
    "local:///home/ada/anchor.jsonl": "anchor.jsonl",
    "simplecache::file:///home/ada/anchor.jsonl": "simplecache::anchor.jsonl",
    "zip://inner.jsonl::file:///home/ada/all.zip": "zip://inner.jsonl::all.zip",
    "C:\\Users\\Ada\\anchor.jsonl": "anchor.jsonl",
    "\\\\server\\share\\anchor.jsonl": "anchor.jsonl",
    f"/home/ada/hub/models--Qwen--Qwen3-0.6B/snapshots/{SHA}": "Qwen/Qwen3-0.6B",
    "/data/.headwater/stages/sae-0123/artifacts/space": "space",
}
KEPT = (
    "anchor.jsonl",
    "package:pipelines/data/anchor.jsonl",
    "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B",
    "accounts/fireworks/models/llama-v3p1-8b-instruct",
    "hf://datasets/allenai/real-toxicity-prompts",
    "https://example.org/data/anchor.jsonl",
    "s3://bucket/folder/anchor.jsonl",
    "embedded:smollm2-135m",
    "gpt2-small-res-jb",
    "",
)
PROSE = ("/no_think", "Write and/or read.", "/think first, and/or answer", "a: /b\nc", "\n", "~", "file: see /etc/x")


@pytest.mark.parametrize("key", ["source", "model"])
@pytest.mark.parametrize("path", LOCAL)
def test_a_local_path_is_shown_by_its_last_part(path: str, key: str) -> None:
    assert without_places({"anchor": [{key: path}]}) == {"anchor": [{key: LOCAL[path]}]}


@pytest.mark.parametrize("name", KEPT)
def test_a_name_that_means_the_same_elsewhere_stays(name: str) -> None:
    assert public_name(name, is_source=True) == name


@pytest.mark.parametrize("text", PROSE)
def test_what_is_no_path_stays(text: str) -> None:
    assert without_places({"system": text, "stop": [text]}) == {"system": text, "stop": [text]}


def test_an_absolute_path_is_found_under_any_key_and_as_a_key() -> None:
    recipe = {
        "count": {"file": "/home/ada/n.txt", "log": "~/logs/log"},
        "prices": {"/home/ada/models/fine": {"input": 1.0}},
    }
    assert without_places(recipe) == {"count": {"file": "n.txt", "log": "log"}, "prices": {"fine": {"input": 1.0}}}


def test_a_relative_folder_that_is_there_is_a_path_though_it_looks_like_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public_name("ada/shards", is_source=True) == "ada/shards"
    (tmp_path / "ada" / "shards").mkdir(parents=True)
    assert public_name("ada/shards", is_source=True) == "shards"


def test_the_address_of_a_server_is_left_out_at_any_depth() -> None:
    engine = {"engine": "openai", "model": "m", "base_url": "http://gpu-17.corp.example:8000/v1"}
    assert without_places({"judge": {"engine": engine}}) == {"judge": {"engine": {"engine": "openai", "model": "m"}}}


def test_the_card_says_that_it_left_something_out_and_where_it_stands() -> None:
    recipe: dict[str, Any] = {"anchor": {"source": "/home/ada/anchor.jsonl"}, "engine": {"base_url": "http://ada:1/v1"}}
    text = render_card(make_card(recipe=recipe))
    assert "  source: anchor.jsonl\n" in text
    assert "recipe.yaml` in the run's own folder has them in full" in " ".join(text.split())
    assert "/home/ada" not in text and "ada:1" not in text
    assert "run's own folder" not in render_card(make_card(recipe={"anchor": {"source": "org/name"}, "base_url": ""}))
