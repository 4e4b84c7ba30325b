"""FAC Synthesis from end to end, with a real model, on a small part of the shipped data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from headwater.core.errors import ConfigError
from headwater.core.store import StageOutput, Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.runs import create_run
from headwater.pipelines.recipes import build
from headwater.tests.flows.short_texts import SHIPPED, write_shortest

pytest.importorskip("torch", reason="the extra `local` is not installed")

KINDS = ("poem", "sql_query", "email", "translation", "regex", "recipe")


@dataclass
class Done:
    path: Path
    outputs: dict[str, StageOutput]
    state: dict[str, Any]


def _recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Ten short texts of each of six kinds in the anchor, six of two in the seed; a thin SAE; six features aimed at."""
    values: dict[str, Any] = {
        "flow": "fac-synthesis",
        "pipeline": "small",
        "anchor": {"source": str(write_shortest(folder, "anchor", KINDS, 10)), "label": "kind"},
        "seed_data": {"source": str(write_shortest(folder, "seed", ["email", "recipe"], 6)), "label": "kind"},
        "measure": {"layer": 8},
        "sae": {"train": {"width": 256, "k": 12, "steps": 40, "batch_tokens": 256}},
        "missing": {"limit": 6, "test": "set_difference", "delta_quantile": 0.5},
        "synthesis": {"candidates": 2, "generations": 2, "sampling": {"max_tokens": 32, "stop": ["\n"]}},
        "reply": {"engine": None},
        "coverage": {"sweep": [0.25, 0.5], "draws": 15},
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
    return values


def _execute(workspace: Workspace, values: dict[str, Any]) -> Done:
    recipe = build(values, "the test's recipe")
    run = create_run(workspace, recipe.pipeline, recipe.model_dump(mode="json"))
    execution = Execution(recipe, run, workspace)
    state = dict(execute(execution))
    return Done(run.path, execution.outputs(), state)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, embedded_cache: Path) -> Workspace:
    """A workspace whose cache already holds the converted model."""
    root = tmp_path_factory.mktemp("fac")
    (root / "cache").symlink_to(embedded_cache)
    return Workspace(root)


@pytest.fixture(scope="module")
def done(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    yield _execute(workspace, _recipe(tmp_path_factory.mktemp("recipe")))


def test_new_rows_fire_missing_features_above_delta(done: Done) -> None:
    delta = done.outputs["missing"].metrics["delta"]
    targets = done.outputs["targets"].read()
    missing, chosen = set(targets["feature"]), set(targets.filter("chosen")["feature"])
    rows = done.outputs["dataset"].read()
    assert rows.height > 0
    assert (rows["activation"] > delta).all()
    assert chosen & set(rows["feature"]) and set(rows["feature"]) <= missing
    assert len(chosen) == 6 < len(missing) == done.outputs["missing"].metrics["missing"]
    for fires, feature in zip(rows["fires"], rows["feature"], strict=True):
        assert feature in fires.to_list()


def test_the_activation_on_a_row_is_what_the_features_stage_measured(done: Done) -> None:
    measured = pl.concat([done.outputs[name].read() for name in ("features.1", "features.2")])
    by_row = {
        row["row"]: dict(zip(row["features"], row["values"], strict=True)) for row in measured.iter_rows(named=True)
    }
    for row in done.outputs["dataset"].read().iter_rows(named=True):
        assert by_row[row["source"]][row["feature"]] == pytest.approx(row["activation"])


def test_every_attempted_row_is_accounted_for(done: Done) -> None:
    for node, output in done.outputs.items():
        counts = output.manifest["counts"]
        assert counts["attempted"] == counts["accepted"] + counts["rejected"], node
        assert counts["owed"] == 0
        assert output.rejects().height == counts["rejected"]
    texts = done.outputs["texts.1"].rows + done.outputs["texts.2"].rows
    assert done.outputs["select"].manifest["counts"]["attempted"] == texts


def test_coverage_rises_and_its_parts_agree_with_a_count_by_hand(done: Done) -> None:
    metrics = done.outputs["coverage"].metrics
    assert metrics["after"]["binary"] >= metrics["before"]["binary"]
    delta = metrics["delta"]
    fired: dict[str, set[int]] = {"anchor": set(), "seed": set()}
    support: dict[int, int] = {}
    for name, features in fired.items():
        for row in done.outputs[f"features.{name}"].read().iter_rows(named=True):
            for feature, value in zip(row["features"], row["values"], strict=True):
                if value > delta:
                    features.add(feature)
                    if name == "anchor":
                        support[feature] = support.get(feature, 0) + 1
    anchor = {feature for feature, rows in support.items() if rows >= 2}
    assert metrics["before"]["n_anchor"] == len(anchor)
    assert metrics["before"]["binary"] == pytest.approx(len(anchor & fired["seed"]) / len(anchor))
    assert metrics["missing"] == len(anchor - fired["seed"])
    rows = done.outputs["dataset"].read().select(row="source")
    made = pl.concat(
        [done.outputs[name].read().select("row", "features", "values") for name in ("features.1", "features.2")]
    )
    fires = made.join(rows, on="row", how="semi").explode("features", "values").filter(pl.col("values") > delta)
    assert metrics["new_alone"]["binary"] == pytest.approx(len(anchor & set(fires["features"])) / len(anchor))


def test_the_dataset_loads_with_datasets_from_the_run_folder(done: Done) -> None:
    import datasets

    loaded = datasets.load_dataset(str(done.path), split="train")
    assert len(loaded) == done.outputs["dataset"].rows
    assert loaded[0]["messages"][0]["role"] == "user"


def test_the_card_gives_the_sizes_that_datasets_itself_finds(done: Done, tmp_path: Path) -> None:
    import datasets

    _, front, _ = (done.path / "README.md").read_text("utf-8").split("---\n", 2)
    told = yaml.safe_load(front)["dataset_info"]
    files = [str(path) for path in done.outputs["dataset"].data_files]
    builder = datasets.load_dataset_builder("parquet", data_files=files, cache_dir=str(tmp_path))
    builder.download_and_prepare()
    assert told["splits"][0]["num_bytes"] == told["dataset_size"] == builder.info.splits["train"].num_bytes
    assert told["download_size"] == sum(Path(file).stat().st_size for file in files)


def test_the_rows_go_through_the_chat_template_of_a_trainer(done: Done) -> None:
    from transformers import AutoTokenizer

    from headwater.llm.embedded import embedded_model_folder

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder(done.path.parents[2] / "cache"))
    for row in done.outputs["dataset"].read().iter_rows(named=True):
        assert row["messages"][0]["content"] in tokenizer.apply_chat_template(row["messages"], tokenize=False)


def test_card_and_report_say_what_was_measured(done: Done) -> None:
    card, report = (done.path / "README.md").read_text("utf-8"), (done.path / "report.html").read_text("utf-8")
    metrics = done.outputs["missing"].metrics
    assert f"{metrics['missing']:,} features were missing" in card
    assert "every live feature counts as relevant" in card and "every live feature counts as relevant" in report
    assert "135 million parameters" in card


def test_a_second_run_reuses_every_stage_and_gives_the_same_bytes(
    done: Done, workspace: Workspace, tmp_path: Path
) -> None:
    again = _execute(workspace, _recipe(tmp_path))
    assert again.state["reused"] == again.state["stages"] == len(done.outputs)
    first, second = (sorted((path / "dataset").glob("*.parquet")) for path in (done.path, again.path))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_a_corrected_licence_reaches_the_card_of_a_reused_run(done: Done, workspace: Workspace, tmp_path: Path) -> None:
    again = _execute(workspace, _recipe(tmp_path, anchor={"license": "cc-by-4.0"}))
    assert again.state["reused"] == len(done.outputs)
    assert "cc-by-4.0" in (again.path / "README.md").read_text("utf-8")


def test_another_workspace_gives_the_same_bytes(done: Done, embedded_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(embedded_cache)
    again = _execute(Workspace(tmp_path), _recipe(tmp_path))
    assert again.state["reused"] == 0
    assert again.outputs["dataset"].content_hash == done.outputs["dataset"].content_hash


@pytest.mark.parametrize("method", ["one_step", "anchor_row", "random_features", "dense_clusters"])
def test_every_control_runs_to_a_dataset(workspace: Workspace, done: Done, method: str, tmp_path: Path) -> None:
    result = _execute(workspace, _recipe(tmp_path, synthesis={"method": method, "clusters": 6}))
    assert result.outputs["dataset"].rows > 0
    assert ("texts.2" in result.outputs) is (method != "one_step")
    assert result.outputs["coverage"].rows == 2
    if method == "random_features":
        delta, targets = result.outputs["missing"].metrics["delta"], result.outputs["targets"].read()
        assert targets["chosen"].all() and set(result.outputs["dataset"].read()["feature"]) <= set(targets["feature"])
        assert (targets["seed_support"] > 0).all(), "by set difference, all that isn't missing fires in the seed"
        assert delta == done.outputs["missing"].metrics["delta"]


def test_a_seed_that_equals_the_anchor_has_nothing_missing(workspace: Workspace, tmp_path: Path) -> None:
    shipped = {"source": str(SHIPPED / "anchor.jsonl"), "label": "kind"}
    same = shipped | {"where": {"kind": ["poem", "regex"]}, "limit": 10}
    values = _recipe(tmp_path) | {"anchor": same, "seed_data": same}
    with pytest.raises(ConfigError, match=r"Nothing is missing.*allow_empty") as caught:
        _execute(workspace, values)
    assert caught.value.exit_code == 2
    result = _execute(workspace, values | {"allow_empty": True})
    assert result.outputs["dataset"].rows == 0
    with pytest.raises(ConfigError, match="Nothing is missing"):
        _execute(workspace, values)  # what was accepted once is not accepted for good
    assert "Nothing is missing" in (result.path / "report.html").read_text("utf-8")
    card = (result.path / "README.md").read_text("utf-8")
    assert "gave the activations" in card and "wrote the user turns" not in card
    assert "the generator was asked for nothing" in card


def test_an_sae_of_another_width_of_model_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    import torch

    from headwater.sae.space import FeatureSpace, TopK

    weights = {
        "W_enc": torch.randn(64, 128),
        "W_dec": torch.randn(128, 64),
        "b_enc": torch.zeros(128),
        "b_dec": torch.zeros(64),
    }
    FeatureSpace.from_weights(weights, TopK(4), model="smollm2-135m", layer=8).save(tmp_path / "sae")
    values = _recipe(tmp_path) | {"sae": {"load": {"source": str(tmp_path / "sae")}}}
    with pytest.raises(ConfigError, match="size 64, but smollm2-135m has hidden size 576"):
        _execute(workspace, values)


def test_a_loaded_sae_gives_the_same_features_as_the_one_trained(
    done: Done, workspace: Workspace, tmp_path: Path
) -> None:
    trained = done.outputs["space"].artifact("space")
    values = _recipe(tmp_path, synthesis={"method": "one_step"}) | {"sae": {"load": {"source": str(trained)}}}
    result = _execute(workspace, values)
    assert result.outputs["features.anchor"].content_hash == done.outputs["features.anchor"].content_hash
    loaded, held_out = result.outputs["space"].metrics, done.outputs["space"].metrics
    assert loaded["tokens"] == done.outputs["features.anchor"].metrics["tokens"], "measured on the anchor, all of it"
    assert loaded["explained_variance"] == pytest.approx(held_out["explained_variance"], abs=0.15)
    assert loaded["l0"] == pytest.approx(12)
    assert 0.5 < loaded["loss_recovered"]["recovered"] < 1


def test_the_manifest_names_models_by_hash_and_no_path_of_this_machine(done: Done) -> None:
    for output in done.outputs.values():
        text = json.dumps(output.manifest)
        assert str(done.path.parents[3]) not in text, "where the workspace is, and the texts"
        assert str(SHIPPED) not in text
    identity = done.outputs["texts.1"].manifest["models"]["engine"]
    assert identity["model"] == "smollm2-135m" and len(identity["revision"]) == 64
