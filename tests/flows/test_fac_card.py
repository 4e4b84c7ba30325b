"""Card and report of FAC Synthesis on outputs made by hand: what they say of controls, sources, SAEs and nulls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from headwater.core.fingerprint import Fingerprint
from headwater.core.rows import schema
from headwater.core.store import OutputWriter, StageOutput, Workspace
from headwater.data_cards.card import render_card
from headwater.data_cards.card_types import DatasetCard
from headwater.flows.fac_card import build_card
from headwater.flows.fac_report import build_report
from headwater.flows.fac_synthesis import FacSynthesis
from headwater.flows.graph import Graph, Node
from headwater.flows.runs import Run, create_run
from headwater.stages.base import StageConfig, StageContext, TableStage

FAC = {"binary": 0.5, "frequency": 0.5, "magnitude": 0.5, "n_anchor": 40}
MISSING = {
    **{"missing": 6, "missing_by_set_difference": 6, "missing_by_both": 6, "live_in_anchor": 40},
    **{"anchor_rows": 8, "seed_rows": 8, "test": "set_difference", "min_support": 2, "delta": 1.0},
    **{"delta_quantile": None, "warnings": []},
}
COVERAGE: dict[str, Any] = {
    **{
        "before": FAC,
        "after": FAC,
        "new_alone": FAC,
        "missing": 6,
        "missing_before": 0.0,
        "missing_covered": 0.5,
        "missing_after": 0.5,
        "missing_never": 6,
        "missing_never_covered": 0.5,
        "chosen": 3,
        "chosen_before": 0.0,
        "chosen_covered": 1.0,
        "chosen_after": 1.0,
    },
    "activation_histogram": {"edges": [0.0, 1.0], "delta": 0.5, "anchor": [1], "new": [1]},
    "random_features": {"observed": 0.5, "mean": 0.2, "q95": 0.3},
    "length_matched_anchor": {"observed": 0.5, "mean": 0.4, "q95": 0.6, "rows": 4, "unmatched": 0},
}
RATE = {
    **{"missing": 6, "missing_by_set_difference": 9, "missing_by_both": 2, "live_in_anchor": 40, "test": "rate"},
    **{"alpha": 0.05, "control_false_discoveries": False, "min_support": 2, "anchor_rows": 8, "seed_rows": 8},
    **{"delta": 1.0, "delta_quantile": None, "warnings": []},
}
RATE_COVERAGE = COVERAGE | {
    **{"missing_before": 4 / 6, "missing_covered": 5 / 6, "missing_after": 1.0, "missing_never": 2},
    **{"missing_never_covered": 0.5, "chosen_before": 2 / 3},
}
"""Of six missing features the seed fires four; the new rows fire five, one of the two that it never fires."""
TRAINED = {
    **{"source": "trained", "width": 256, "d_model": 576, "train_tokens": 900, "explained_variance": 0.7},
    **{"l0": 12.0, "dead_share": 0.1, "loss_recovered": {"recovered": 0.8}},
}
MODEL = {"model": {"model": "smollm2-135m", "revision": "f" * 64, "engine": "embedded", "dtype": "float32"}}


class Applaud(TableStage[StageConfig]):
    """Claps for the anchor's rows.

    Nothing else.
    """

    name: ClassVar[str] = "applaud"
    version: ClassVar[int] = 1
    inputs: ClassVar[Mapping[str, Any]] = {}

    @property
    def output(self) -> pa.Schema:
        return schema()

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None: ...


class Wave(Applaud):  # no docstring: only a name to go by
    name: ClassVar[str] = "wave"


class WithNewcomers(FacSynthesis):
    def graph(self) -> Graph:
        graph = super().graph()
        return Graph((*graph, Node("applause", Applaud(StageConfig())), Node("waving", Wave(StageConfig()))), "dataset")


Made = tuple[FacSynthesis, Run, dict[str, StageOutput]]


@pytest.fixture
def make(workspace: Workspace) -> Callable[..., Made]:
    """A recipe, and an output for every node of its graph: metrics by node name, and `rows` in the dataset."""

    def made(
        changes: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Mapping[str, Any]] | None = None,
        kind: type[FacSynthesis] = FacSynthesis,
        rows: int = 0,
    ) -> Made:
        base = {"pipeline": "small", "measure": {"layer": 8}, "reply": {"engine": None}}
        sources = {"anchor": {"source": "anchor.jsonl"}, "seed_data": {"source": "seed.jsonl"}}
        recipe = kind.model_validate({**base, **sources, **(changes or {})})
        told: dict[str, Mapping[str, Any]] = {"space": TRAINED, "missing": MISSING, "coverage": COVERAGE}
        told |= {name: {"source": f"{name}.jsonl"} for name in ("anchor", "seed", "corpus")} | dict(metrics or {})
        told |= {"select": {"steps": {}}}
        outputs = {
            node.name: _publish(workspace, node, told.get(node.name, {}), rows if node.name == "dataset" else 0)
            for node in recipe.graph()
        }
        return recipe, create_run(workspace, recipe.pipeline, recipe.model_dump(mode="json")), outputs

    return made


def _publish(workspace: Workspace, node: Node, metrics: Mapping[str, Any], rows: int) -> StageOutput:
    fingerprint = Fingerprint({"node": node.name, "version": node.stage.version, "made": time.monotonic_ns()})
    out = OutputWriter(workspace.output_path(node.stage.name, fingerprint), node.stage.output, node.name)
    if node.name == "space":
        out.write_rows(
            [{"id": "space", "width": metrics["width"], "d_model": 576, "layer": 8, "model": "smollm2-135m"}]
        )
    empty = dict.fromkeys(node.stage.output.names)
    user = {"messages": [{"role": "user", "content": "hello"}], "fires": [1], "feature": 1, "activation": 2.0}
    out.write_rows([empty | user | {"id": f"row-{n}"} for n in range(rows)])
    out.metrics = dict(metrics)
    meter = {"tokens_in": 0, "tokens_out": 0, "dollars": 0.0}
    facts = {"node": node.name, "stage": node.stage.name, "models": MODEL, "libraries": {}, "seconds": 0.0}
    return out.publish(fingerprint, {**facts, "meter": meter})


def _card(made: Made) -> DatasetCard:
    return build_card(*made)


def _report(made: Made) -> str:
    return build_report(*made).model_dump_json()


def test_a_stage_that_came_later_is_described_in_its_own_words_or_by_its_name(make: Callable[..., Made]) -> None:
    made = make(kind=WithNewcomers)
    does = {stage.name: stage.does for stage in _card(made).stages}
    assert does["applause"] == "Claps for the anchor's rows."
    assert does["waving"] == "wave"
    assert does["anchor"] == "Reads the dataset; unusable rows are named."
    assert "applause" in _report(made)


@pytest.mark.parametrize(
    ("synthesis", "said", "unsaid"),
    [
        (
            {},
            "4 candidates in step one and 4 texts in step two. Step two was shown the strongest of the candid",
            "control",
        ),
        (
            {},
            "all features, or the anchor's strongest row where none fires the feature, beside the feature's weakest",
            "",
        ),
        ({"pair": "own"}, "the strongest of the feature's own candidates", "all features"),
        ({"contrast": False}, "without a weak example", "weakest"),
        ({"method": "one_step"}, "8 candidates in step one; there was no step two.", "texts in step two"),
        ({"method": "anchor_row"}, "the anchor's strongest row in place of a contrastive pair", "candidates of all"),
        ({"method": "random_features"}, "every chosen live feature, drawn at random", "missing feature "),
        ({"method": "dense_clusters"}, "stand 48 k-means clusters of the anchor's hidden states", "maximum"),
    ],
)
def test_the_card_tells_how_each_method_went(
    make: Callable[..., Made], synthesis: Mapping[str, Any], said: str, unsaid: str
) -> None:
    clusters = {"source": "clusters", "width": 48, "d_model": 576}
    metrics = {"space": clusters} if synthesis.get("method") == "dense_clusters" else {}
    how = _card(make({"synthesis": synthesis}, metrics)).how
    assert said in how
    assert not unsaid or unsaid not in how


def test_features_drawn_at_random_are_not_called_missing(make: Callable[..., Made]) -> None:
    made = make({"synthesis": {"method": "random_features"}})
    sentence = "As a control, 3 live features that are not missing were aimed at instead"
    assert sentence in _card(made).summary and sentence in _report(made)
    plain = make()
    assert (
        "3 of the missing features were aimed at" in _card(plain).summary and "As a control" not in _card(plain).summary
    )


def _measures(made: Made) -> dict[str, tuple[float | None, float | None, str]]:
    return {measure.name: (measure.before, measure.after, measure.hint) for measure in _card(made).measures}


def test_the_rate_test_is_not_said_to_find_what_the_seed_lacks(make: Callable[..., Made]) -> None:
    made = make(metrics={"missing": RATE, "coverage": RATE_COVERAGE}, rows=2)
    lead, summary = build_report(*made).lead, _card(made).summary
    assert "the seed dataset fires 6 of them more rarely, 2 of which the seed never fires." in lead
    assert "which the seed dataset fires more rarely than the anchor dataset" in summary
    assert "6 features were missing in this sense, 2 of which the seed never fires" in summary
    assert not any("lacks" in text for text in (lead, summary, render_card(_card(made))))


def test_what_the_seed_itself_fires_of_the_missing_features_stands_beside_the_new_rows(
    make: Callable[..., Made],
) -> None:
    made = make(metrics={"missing": RATE, "coverage": RATE_COVERAGE}, rows=2)
    measures, report = _measures(made), _report(made)
    assert "Of all 6 missing features the new rows fire 83.3%, against 66.7% in the seed and 20.0% of eq" in report
    assert "Of the 2 that the seed never fires they fire 50.0%." in report
    assert "100% of those fire in at least one of 2 new rows (in the seed: 66.7%)" in report
    assert measures["Missing features that fire"][:2] == (4 / 6, 1.0)
    assert "the new rows alone fire 83.3%, and 20.0% of equally many" in measures["Missing features that fire"][2]
    assert measures["Missing features that the seed never fires"][:2] == (0.0, 0.5)
    assert "of 2; the other 4" in measures["Missing features that the seed never fires"][2]
    assert measures["Features aimed at that fire"][:2] == (2 / 3, 1.0)
    for label in ("of these, never in the seed", "The 2 missing ones that the seed never fires", "fired by the seed"):
        assert label in report


def test_by_set_difference_the_seed_lacks_what_is_missing(make: Callable[..., Made]) -> None:
    made = make(rows=2)
    report = build_report(*made).lead
    assert "the seed dataset lacks 6 of them." in report and "rarely" not in report and "in the seed" not in report
    assert "which the seed dataset lacks and the anchor dataset fires: 6 features were missing. " in _card(made).summary
    assert "Missing features that the seed never fires" not in _measures(made)


@pytest.mark.parametrize("missing", [RATE, MISSING])
def test_rows_of_the_random_control_are_not_said_to_fire_what_is_missing(
    make: Callable[..., Made], missing: Mapping[str, Any]
) -> None:
    summary = _card(make({"synthesis": {"method": "random_features"}}, {"missing": missing}, rows=2)).summary
    assert summary.startswith("2 synthetic rows of a control in the search for features")
    assert "made to fire" not in summary


def test_what_a_judge_left_is_named_beside_what_the_seed_fires_of_it(make: Callable[..., Made]) -> None:
    engine = {"engine": "openai", "model": "m", "base_url": "http://localhost:9/v1"}
    made = make({"judge": {"engine": engine}}, {"missing": RATE | {"missing": 9}, "coverage": RATE_COVERAGE}, rows=2)
    lead = build_report(*made).lead
    assert "fires 9 of them more rarely" in lead
    assert "Of all 6 missing features that the judge kept the new rows fire 83.3%, against 66.7% in the seed" in lead


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (MISSING | {"missing": 0}, "the seed (8 rows) fires every feature that the anchor (8 rows) fires in at least"),
        (
            RATE | {"missing": 0},
            "fires no feature more rarely than the anchor (8 rows) by the rate test, though it never",
        ),
        (RATE | {"missing": 0, "live_in_anchor": 0}, "could be missing: the anchor (8 rows) fires no feature above δ"),
    ],
)
def test_nothing_missing_is_told_as_the_test_found_it(
    make: Callable[..., Made], missing: Mapping[str, Any], said: str
) -> None:
    nothing = dict.fromkeys(("missing_before", "missing_covered", "missing_after", "missing_never_covered"))
    nothing |= dict.fromkeys(("chosen_before", "chosen_covered", "chosen_after"))
    coverage = COVERAGE | nothing | {"missing": 0, "missing_never": 0, "chosen": 0, "random_features": None}
    made = make(metrics={"missing": missing, "coverage": coverage})
    assert said in build_report(*made).lead
    card = _card(made)
    assert card.summary == "No rows: no feature was aimed at, because nothing was missing."
    assert card.how.endswith("No feature was aimed at, so the generator was asked for nothing.")
    assert len(card.limits) == 1 and card.limits[0].startswith("A feature is a direction")
    render_card(card)


def test_clusters_are_not_called_an_sae(make: Callable[..., Made]) -> None:
    clusters = {"source": "clusters", "width": 48, "d_model": 576}
    made = make({"synthesis": {"method": "dense_clusters"}}, {"space": clusters})
    assert not any("SAE" in limit or "sparse autoencoder" in limit for limit in _card(made).limits)
    assert "Sparse autoencoder" not in _report(made)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"why_not": "5 features are missing and 8 are live.", "missing": 5}, "5 features are missing and 8 are live"),
        ({"missing": 0}, "nothing was missing"),
        ({}, "no row was made"),
    ],
)
def test_a_null_that_is_not_there_is_explained_by_its_own_reason(
    make: Callable[..., Made], changes: Mapping[str, Any], reason: str
) -> None:
    coverage = {**COVERAGE, "random_features": None, "length_matched_anchor": None, **changes}
    made = make(metrics={"coverage": coverage})
    assert f'"why_empty":"{reason}"' in _report(made)
    assert f"not compared with random live features because {reason}" in render_card(_card(made))


def test_a_missing_null_of_lengths_is_explained_beside_the_other(make: Callable[..., Made]) -> None:
    why = {"length_matched_anchor": None, "why_not": "No generated row is as long as a row of the comparison pool."}
    report = _report(make(metrics={"coverage": {**COVERAGE, **why}}))
    assert "no such anchor rows here because no generated row is as long as a row of the comparison pool." in report
    assert "no such anchor rows" not in _report(make())


def test_the_corpus_of_the_sae_is_a_source_with_its_licence(make: Callable[..., Made]) -> None:
    card = _card(make({"sae": {"corpus": {"source": "more.jsonl", "license": "cc-by-sa-4.0"}}}))
    assert [source.role for source in card.sources] == ["anchor", "seed", "corpus"]
    assert (card.sources[2].name, card.sources[2].licence) == ("corpus.jsonl", "cc-by-sa-4.0")
    assert "trained on the anchor, the seed and a corpus" in card.how


@pytest.mark.parametrize(
    ("load", "name"),
    [
        ({"source": "/home/someone/saes/fine-sae"}, "fine-sae"),
        ({"source": "some-release", "sae_id": "blocks.8"}, "some-release/blocks.8"),
    ],
)
def test_a_loaded_sae_is_named_without_a_path_of_this_machine(
    make: Callable[..., Made], load: Mapping[str, str], name: str
) -> None:
    made = make({"sae": {"load": load}}, {"space": {"source": "loaded", "width": 16384, "d_model": 576, "layer": 8}})
    card, full = _card(made), f"{name} (width 16,384, layer 8 of smollm2-135m)"
    assert f"The SAE is {full}" in card.how
    assert full in [model.name for model in card.models]
    assert full in _report(made)
    assert "someone" not in card.how + str(card.models) + _report(made)


def test_no_folder_and_no_server_of_the_author_reaches_card_or_report(make: Callable[..., Made]) -> None:
    home = "/home/someone/secret"
    server = {"engine": "openai", "model": f"{home}/served", "base_url": "http://gpu.someone.example:8000/v1"}
    changes = {
        "anchor": {"source": f"{home}/anchor.jsonl"},
        "seed_data": {"source": f"file://{home}/seed.jsonl"},
        "measure": {"layer": 8, "model": {"engine": "transformers", "model": f"{home}/small-model"}},
        "sae": {"load": {"source": f"{home}/fine-sae"}},
        "synthesis": {"engine": server},
        "judge": {"engine": server},
    }
    metrics = {
        "seed": {"source": f"file://{home}/seed.jsonl"},
        "space": {"source": "loaded", "width": 8, "d_model": 576, "layer": 8},
    }
    made = make(changes, metrics)
    card = render_card(_card(made))
    assert "someone" not in card and "secret" not in card and "someone" not in _report(made)
    assert "block 8 of `small-model`" in card and "| seed | seed.jsonl |" in card
    for line in (
        "source: anchor.jsonl",
        "source: seed.jsonl",
        "source: fine-sae",
        "model: small-model",
        "model: served",
    ):
        assert f"{line}\n" in card
    assert made[1].recipe["anchor"]["source"] == f"{home}/anchor.jsonl", "the run folder keeps it to run again"
    assert made[1].recipe["judge"]["engine"]["base_url"] == server["base_url"]


def test_figures_of_a_trained_sae_say_on_which_texts_they_were_measured(make: Callable[..., Made]) -> None:
    report = _report(make())
    assert "loss recovered, mostly on texts trained on" in report
    assert "explained variance, held out" in report
    assert "dead features, on texts trained on" in report


def test_figures_of_a_loaded_sae_were_measured_on_the_anchor(make: Callable[..., Made]) -> None:
    report = _report(make({"sae": {"load": {"source": "fine-sae"}}}, {"space": {**TRAINED, "source": "loaded"}}))
    assert "loss recovered, on the anchor" in report
    assert "held out" not in report and "texts trained on" not in report
