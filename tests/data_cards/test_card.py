"""A card's metadata is what the Hub and `datasets` read, and its text says what a reader needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from card_samples import MEANINGS, SCHEMA, make_card, make_rows
from huggingface_hub import DatasetCard as HubCard

from headwater.core.errors import ConfigError
from headwater.data_cards.card import Split, Table, render_card, size_category


def write_run(folder: Path, card_text: str, rows: int = 7) -> None:
    (folder / "data").mkdir()
    with pq.ParquetWriter(folder / "data" / "part-00000.parquet", SCHEMA) as writer:
        if rows:
            writer.write_table(pa.Table.from_pylist(make_rows(rows), schema=SCHEMA))
    (folder / "README.md").write_text(card_text, "utf-8")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of our own for `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_the_hubs_own_parser_reads_the_metadata() -> None:
    data: Any = HubCard(render_card(make_card())).data
    assert data.license == "apache-2.0"
    assert data.language == ["en"]
    assert data.task_categories == ["text-generation"]
    assert data.size_categories == ["n<1K"]
    assert data.pretty_name == "Requests that fill the holes of a seed"
    assert data.tags == ["synthetic", "headwater"]
    splits = [{"split": "train", "path": "data/*.parquet"}]
    assert data["configs"] == [{"config_name": "default", "data_files": splits}]


def test_a_licence_of_ones_own_has_its_name_and_link_in_the_metadata() -> None:
    own = {"licence": "other", "licence_name": "house-rules-1.0", "licence_link": "LICENSE.md"}
    data: Any = HubCard(render_card(make_card(**own))).data
    assert (data.license, data["license_name"], data["license_link"]) == ("other", "house-rules-1.0", "LICENSE.md")
    plain = render_card(make_card())
    assert "license_name" not in plain and "license_link" not in plain


def test_further_tags_follow_synthetic_without_repeating_it() -> None:
    data: Any = HubCard(render_card(make_card(tags=("toxicity", "synthetic")))).data
    assert data.tags == ["synthetic", "headwater", "toxicity"]


def test_load_dataset_on_the_folder_gives_exactly_the_declared_features(tmp_path: Path, offline: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, render_card(make_card()))
    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(offline))
    assert rows.features == datasets.Features.from_arrow_schema(SCHEMA)
    assert rows.to_list() == make_rows(7)


def test_the_declared_types_win_over_what_a_file_would_suggest(tmp_path: Path, offline: Path) -> None:
    folder = tmp_path / "run"
    (folder / "data").mkdir(parents=True)
    narrow = pa.table({"id": ["a"], "feature": pa.array([3], pa.int32()), "explanation": pa.nulls(1)})
    pq.write_table(narrow, folder / "data" / "part-00000.parquet")
    wanted = pa.schema([("id", pa.string()), ("feature", pa.int64()), ("explanation", pa.string())])
    split = Split(name="train", path="data/*.parquet", rows=1, bytes=1, arrow_bytes=1)
    table = Table(arrow_schema=wanted, meanings=dict.fromkeys(wanted.names, "x"), splits=(split,))
    (folder / "README.md").write_text(render_card(make_card(tables=(table,))), "utf-8")
    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(offline))
    assert rows.features == datasets.Features.from_arrow_schema(wanted)


def test_loading_fails_when_the_card_claims_other_rows_than_there_are(tmp_path: Path, offline: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, render_card(make_card()), rows=6)
    with pytest.raises(datasets.exceptions.NonMatchingSplitsSizesError):
        datasets.load_dataset(str(folder), split="train", cache_dir=str(offline))


def test_a_second_table_becomes_a_configuration_of_its_own(tmp_path: Path, offline: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    reject_schema = pa.schema([("id", pa.string()), ("reason", pa.string())])
    rejects = Table(
        name="rejects",
        arrow_schema=reject_schema,
        meanings={"id": "row", "reason": "why"},
        splits=(Split(name="train", path="rejects/*.parquet", rows=1, bytes=1, arrow_bytes=1),),
    )
    write_run(folder, render_card(make_card(tables=(*make_card().tables, rejects))))
    (folder / "rejects").mkdir()
    pq.write_table(pa.table({"id": ["a"], "reason": ["copy"]}), folder / "rejects" / "part-00000.parquet")
    assert datasets.load_dataset(str(folder), split="train", cache_dir=str(offline)).num_rows == 7
    loaded = datasets.load_dataset(str(folder), "rejects", split="train", cache_dir=str(offline))
    assert loaded.to_list() == [{"id": "a", "reason": "copy"}]


def test_an_empty_dataset_streams_with_its_columns_and_the_card_says_how(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    split = Split(name="train", path="data/*.parquet", rows=0, bytes=1, arrow_bytes=1)
    text = render_card(make_card(tables=(Table(arrow_schema=SCHEMA, meanings=MEANINGS, splits=(split,)),)))
    write_run(folder, text, rows=0)
    rows = datasets.load_dataset(str(folder), split="train", streaming=True)
    assert list(rows) == []
    assert rows.features == datasets.Features.from_arrow_schema(SCHEMA)
    assert "streaming=True" in text


def test_the_text_has_every_number_and_name() -> None:
    text = render_card(make_card())
    for expected in (
        "| F_miss fired | 0% | 80.3% | null: 12.1% |",
        "| fac.synthesise | `near_duplicate` | 1,234 | MinHash |",
        "| fac.synthesise v2 | writes candidates for every missing feature | 1,200 | 900 | 300 | `0123456789ab` |",
        "| generator | SmolLM2-135M-Instruct | `sha256:ab` | apache-2.0 |  |",
        "| anchor | anchor.jsonl | 336 | cc0-1.0 |",
        "| `messages` | list of {role, content} | the conversation, one user turn |",
        "pipeline run fac-synthesis -c recipe.yaml",
        "  width: 4096",
        "- A generator of 135M parameters writes silly rows.",
        f"- fingerprint: `{'f' * 64}`",
    ):
        assert expected in text


def test_a_bar_or_a_newline_in_a_value_does_not_break_a_table() -> None:
    text = render_card(make_card())
    assert "what the feature is said to mean \\| may be empty |" in text


def test_a_card_without_rejects_or_models_says_so() -> None:
    text = render_card(make_card(rejects=(), models=(), measures=()))
    assert "No row was rejected." in text
    assert "No model was used." in text
    assert "This pipeline measures no coverage." in text


def test_a_recipe_with_backticks_stays_inside_its_code_block() -> None:
    text = render_card(make_card(recipe={"prompt": "```python\nprint()\n```"}))
    assert "````yaml\n" in text
    assert text.count("````") == 2


@pytest.mark.parametrize(
    ("recipe", "planted"),
    [
        ({"engine": {"api_key": "planted-value-1"}}, "planted-value-1"),
        ({"engines": [{"headers": {"Authorization": "Bearer planted-value-2"}}]}, "planted-value-2"),
        ({"hub": {"hf_token": "hf_PLANTEDplantedPLANTEDplanted"}}, "hf_PLANTED"),
        ({"source": "https://user:planted-value-3@host/v1.jsonl"}, "planted-value-3"),
        ({"apiKey": "planted-value-4"}, "planted-value-4"),
    ],
)
def test_a_key_planted_in_the_recipe_never_reaches_the_card(recipe: dict[str, Any], planted: str) -> None:
    text = render_card(make_card(recipe=recipe))
    assert planted not in text
    assert "[redacted]" in text


def test_a_key_planted_in_running_text_never_reaches_the_card() -> None:
    key = "sk-planted0123456789abcdef"
    text = render_card(make_card(command=f"OPENAI_API_KEY={key} pipeline run x --api-key {key}", how=f"With {key}."))
    assert key not in text


def test_a_column_without_an_explanation_is_refused_by_name() -> None:
    split = Split(name="train", path="data/*.parquet", rows=1, bytes=1, arrow_bytes=1)
    table = Table(arrow_schema=SCHEMA, meanings={"id": "row"}, splits=(split,))
    with pytest.raises(ConfigError, match="activation"):
        render_card(make_card(tables=(table,)))


def test_a_split_name_that_datasets_refuses_is_refused() -> None:
    split = Split(name="train-a", path="data/*.parquet", rows=1, bytes=1, arrow_bytes=1)
    table = Table(arrow_schema=SCHEMA, meanings=MEANINGS, splits=(split,))
    with pytest.raises(ConfigError, match="train-a"):
        render_card(make_card(tables=(table,)))


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (99_999, "10K<n<100K"),
        (10**6, "1M<n<10M"),
        (10**9, "1B<n<10B"),
        (10**10, "10B<n<100B"),
    ],
)
def test_size_categories_are_the_hubs(rows: int, name: str) -> None:
    assert size_category(rows) == name
