"""Interpretation by a judge behind real HTTP: what it keeps and drops, what that costs, and what a kill costs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pytest
import yaml

from headwater.core.errors import ConfigError, PermanentError, Stopped
from headwater.core.journal import Journal
from headwater.core.rows import row_id
from headwater.core.seeds import derive_seed
from headwater.core.store import StageOutput, Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.runs import create_run
from headwater.pipelines.recipes import build
from headwater.tests.flows.judges import by_coin, by_rule, kind_of
from headwater.tests.llm.fault_server import Body, FaultServer, Plan

pytest.importorskip("torch", reason="the extra `local` is not installed")

COMMAND = Path(sys.executable).with_name("pipeline")
SHIPPED = Path(__file__).parents[2] / "pipelines" / "data"
KINDS = ["poem", "sql_query", "email", "translation", "regex", "recipe"]
LIMIT = 24
"""Features put to the judge."""
AIMED_AT = 6
TASK = "Short requests that people send to a chat assistant."


class Judge(FaultServer):
    """Counts its answers by kind of question, and gives other ones to the kinds that `instead` names."""

    def __init__(self, name: str, rule: Callable[[Body], str], *, latency_s: float = 0, **instead: str) -> None:
        super().__init__(Plan(latency_s), reply=self._say)
        self.name = name
        self._rule = rule
        self._instead = instead
        self.kinds: Counter[str] = Counter()

    def _say(self, body: Body) -> str:
        kind = kind_of(body)
        self.kinds[kind] += 1
        return self._instead.get(kind) or self._rule(body)

    def recipe(self, **settings: Any) -> dict[str, Any]:
        """Six kinds in the anchor, two of them in the seed, a thin SAE, and this judge."""
        engine = {"engine": "openai", "model": self.name, "base_url": self.base_url, "max_concurrency": 2}
        anchor, seed = ({"kind": KINDS}, {"kind": ["email", "recipe"]})
        return {
            "flow": "fac-synthesis",
            "pipeline": "judged",
            "anchor": {"source": str(SHIPPED / "anchor.jsonl"), "label": "kind", "where": anchor},
            "seed_data": {"source": str(SHIPPED / "seed.jsonl"), "label": "kind", "where": seed},
            "measure": {"layer": 2},
            "sae": {"train": {"width": 256, "k": 8, "steps": 30, "batch_tokens": 128, "held_out_share": 0.03}},
            "missing": {"limit": AIMED_AT, "delta_quantile": 0.3, "alpha": 0.3},
            "judge": {"task": TASK, "engine": engine, "settings": {"limit": LIMIT}} | settings,
            "synthesis": {
                "candidates": 1,
                "generations": 1,
                "max_reject_share": 1.0,
                "sampling": {"max_tokens": 32, "stop": ["\n"]},
            },
            "reply": {"engine": None},
            "coverage": {"sweep": [0.5], "draws": 15},
            "prices": {self.name: {"input": 2.5, "output": 10.0}},
            "allow_empty": True,
        }


@dataclass
class Judged:
    path: Path
    outputs: dict[str, StageOutput]
    forecast: int
    """Calls that the judge's stage was forecast to make, once the missing features were known."""

    @property
    def interpreted(self) -> StageOutput:
        return self.outputs["interpret"]

    @property
    def asked(self) -> int:
        """Features put to the judge: all missing ones, but no more than the limit."""
        assert self.outputs["missing"].metrics["missing"] >= LIMIT
        return LIMIT

    @property
    def kept(self) -> pl.DataFrame:
        return self.interpreted.read()


def _up_to_the_judge(execution: Execution) -> None:
    for node in execution.graph:
        execution.run_node(node.name)
        if node.name == "interpret":
            break


async def _run(
    root: Path, judge: Judge, *, whole: bool = False, max_cost: float | None = None, **settings: Any
) -> Judged:
    """Everything, or all up to the judge. The run has a thread of its own: the server needs this one."""
    return await _run_recipe(root, judge.recipe(**settings), whole=whole, max_cost=max_cost)


async def _run_recipe(
    root: Path, values: dict[str, Any], *, whole: bool = False, max_cost: float | None = None
) -> Judged:
    recipe = build(values, "the test's recipe")
    workspace = Workspace(root)
    run = create_run(workspace, recipe.pipeline, recipe.resolved())
    execution = Execution(recipe, run, workspace, max_cost=max_cost)
    await asyncio.to_thread(*((execute, execution) if whole else (_up_to_the_judge, execution)))
    outputs = execution.outputs()
    forecast = execution.graph["interpret"].stage.forecast({"rows": outputs["missing"].rows})
    return Judged(run.path, outputs, forecast.calls)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, embedded_cache: Path) -> Path:
    """A workspace that all tests share: only the judge differs, so the SAE is trained once."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "cache").symlink_to(embedded_cache)
    return folder


def _mean_score(found: Judged) -> float:
    scores = pl.concat([found.kept["detection"], found.kept["fuzzing"]]).drop_nulls()
    assert len(scores) >= found.kept.height > 2
    return float(scores.mean())  # type: ignore[arg-type]


async def test_explanations_of_a_judge_that_reads_predict_and_those_of_a_coin_do_not(root: Path) -> None:
    async with Judge("rule", by_rule) as judge:
        reading = await _run(root, judge)
    async with Judge("coin", by_coin) as judge:
        tossing = await _run(root, judge)

    assert tossing.kept.height == tossing.asked
    assert _mean_score(tossing) == pytest.approx(0.5, abs=0.12)
    assert _mean_score(reading) > 0.65


async def test_what_the_judge_says_reaches_prompts_rows_card_and_report(root: Path) -> None:
    async with Judge("rule", by_rule) as judge:
        found = await _run(root, judge, whole=True)
    meant = dict(found.kept.select("feature", "explanation").iter_rows())
    rows = datasets.load_dataset(str(found.path), cache_dir=str(root / "hf"), split="train")
    card, report = ((found.path / name).read_text("utf-8") for name in ("README.md", "report.html"))

    for prompt in found.outputs["prompts.1"].read().iter_rows(named=True):
        assert f"What they share: {meant[prompt['feature']]}" in prompt["prompt"][0]["content"]
    assert len(rows) > 0
    assert [meant[row["feature"]] for row in rows] == [row["explanation"] for row in rows]
    kept = f"The judge kept {len(meant)} of the {found.asked} features put to it"
    assert kept in card and kept in report
    assert "| judged the features | rule |" in card
    assert "What the judge said" in report


async def test_features_that_the_judge_turns_down_are_counted_and_never_aimed_at(root: Path) -> None:
    async with Judge("picky", by_rule, relevance="It is layout.\nVERDICT: no") as judge:
        found = await _run(root, judge, whole=True)
    reasons = found.interpreted.manifest["reasons"]

    assert reasons["irrelevant"] == judge.kinds["relevance"] > 0
    assert sum(reasons.values()) - reasons["over_limit"] == found.asked and judge.kinds["detection"] == 0
    assert found.outputs["prompts.1"].rows == found.outputs["dataset"].rows == 0
    assert f"The judge kept 0 of the {found.asked}" in (found.path / "report.html").read_text("utf-8")


async def test_beyond_the_limit_the_least_sure_features_are_left_out_by_name(root: Path) -> None:
    async with Judge("coin", by_coin) as judge:
        found = await _run(root, judge)
    missing = found.outputs["missing"].read()
    left_out = found.interpreted.rejects()

    assert set(left_out["reason"]) == {"over_limit"}
    assert left_out.height + found.kept.height == missing.height == found.outputs["missing"].metrics["missing"]
    unsure = missing.join(left_out, on="id", how="semi")["p_value"]
    assert max(found.kept["p_value"]) <= min(unsure)


async def test_with_all_of_the_anchor_judged_only_relevant_features_count_in_fac(root: Path) -> None:
    settings: dict[str, Any] = {"scope": "anchor", "settings": {"limit": 10_000, "score": False}}
    async with Judge("rule", by_rule) as judge:
        found = await _run(root, judge, whole=True, **settings)
    metrics, live = found.outputs["coverage"].metrics, found.outputs["missing"].metrics["live_in_anchor"]
    kept = {status: set(rows["feature"]) for (status,), rows in found.kept.group_by("status")}
    delta, seed = found.outputs["missing"].metrics["delta"], found.outputs["features.seed"].read()
    in_seed = seed.explode("features", "values").filter(pl.col("values") > delta)["features"]

    assert found.interpreted.manifest["counts"]["attempted"] == live
    assert metrics["before"]["n_anchor"] == found.kept.height < live
    assert metrics["before"]["n_covered"] == len(set(in_seed) & (kept["missing"] | kept["present"]))
    assert metrics["missing"] == len(kept["missing"]) > 0
    assert set(found.outputs["targets"].read()["feature"]) == kept["missing"]
    assert "FAC counts these alone" in (found.path / "README.md").read_text("utf-8")


async def test_what_the_judge_turns_down_is_not_missing(root: Path) -> None:
    async with Judge("rule", by_rule) as judge:
        found = await _run(root, judge, whole=True)
    metrics, before = found.outputs["coverage"].metrics, found.outputs["missing"].metrics

    assert metrics["missing"] == found.kept.height < before["missing"]
    assert metrics["before"]["n_anchor"] == before["live_in_anchor"]


async def test_a_task_that_is_not_given_is_not_claimed_to_be_judged(root: Path) -> None:
    async with Judge("rule", by_rule) as judge:
        found = await _run(root, judge, whole=True, task="")

    assert judge.kinds["relevance"] == 0
    assert found.kept["relevance"].null_count() == found.kept.height > 0
    for name in ("README.md", "report.html"):
        text = (found.path / name).read_text("utf-8")
        assert "relevance was not asked" in text and "found relevant" not in text


async def test_an_unreadable_verdict_rejects_the_feature_with_the_reply(root: Path) -> None:
    settings = {"limit": LIMIT, "max_unreadable_share": 1.0}
    async with Judge("mumbling", by_rule, verify="It fits rather well, I would say.") as judge:
        found = await _run(root, judge, settings=settings)
    unreadable = found.interpreted.rejects().filter(pl.col("reason") == "no_answer")

    assert found.kept.is_empty()
    assert 2 * unreadable.height == judge.kinds["verify"] > 0
    assert set(unreadable["raw"]) == {"It fits rather well, I would say."}
    assert all(re.match(r"feature \d+: ", detail) for detail in unreadable["detail"])


async def test_a_judge_that_answers_when_asked_again_loses_no_feature(root: Path) -> None:
    seen: set[str] = set()

    def at_second_asking(body: Body) -> str:
        prompt = str(body["messages"])
        if prompt in seen:
            return by_coin(body)
        seen.add(prompt)
        return "It fits rather well, I would say."

    async with Judge("hesitant", at_second_asking) as judge:
        judge.script("cut")
        found = await _run(root, judge)
    rooms = Counter(body["max_tokens"] for body in judge.bodies)

    assert found.kept.height == found.asked
    assert found.kept["unanswered"].sum() == 0
    assert found.interpreted.manifest["meter"]["calls"] == 2 * len(seen)
    assert rooms == {512: 2 * len(seen) - 1, 1024: 1}


async def test_a_judge_whose_replies_cannot_be_read_ends_the_run_at_the_judge(root: Path) -> None:
    async with Judge("prose", by_rule, explain="I see many texts here.") as judge:
        with pytest.raises(PermanentError, match=rf"Stage interpret rejected {LIMIT} of {LIMIT} rows .*no_answer"):
            await _run(root, judge, whole=True)


async def test_a_part_of_the_anchor_s_features_is_not_judged_for_the_whole(root: Path) -> None:
    async with Judge("rule", by_rule) as judge:
        with pytest.raises(ConfigError, match=rf"judge\.settings\.limit' is {LIMIT}, but .*Raise it to"):
            await _run(root, judge, scope="anchor")


async def test_the_random_control_is_judged_before_what_is_missing(root: Path) -> None:
    async with Judge("coin", by_coin) as judge:
        recipe = judge.recipe(settings={"limit": AIMED_AT, "score": False})
        recipe["synthesis"]["method"] = "random_features"
        found = await _run_recipe(root, recipe, whole=True)
    targets = found.outputs["targets"].read()

    assert found.interpreted.manifest["reasons"]["over_limit"] == found.outputs["missing"].metrics["missing"]
    assert targets.height == AIMED_AT and set(targets["status"]) == {"random"}


async def test_unreadable_scores_are_counted_and_give_no_score(root: Path) -> None:
    async with Judge("silent", by_coin, detection="Hard to say.", fuzzing="ACTIVE: 99") as judge:
        found = await _run(root, judge)

    assert found.kept.height == found.asked
    assert found.kept["detection"].null_count() == found.kept["fuzzing"].null_count() == found.asked
    assert found.kept["unanswered"].min() > 5  # type: ignore[operator]


async def test_every_call_is_metered_priced_and_within_the_forecast(root: Path) -> None:
    async with Judge("metered", by_coin) as judge:
        found = await _run(root, judge)
    meter = found.interpreted.manifest["meter"]
    tokens = (meter["tokens_in"] * 2.5 + meter["tokens_out"] * 10.0) / 1e6

    assert meter["calls"] == sum(judge.kinds.values()) == sum(judge.served.values())
    assert meter["dollars"] == pytest.approx(tokens)
    assert found.forecast == 9 * found.asked
    assert 0.7 * found.forecast <= meter["calls"] <= found.forecast


async def test_a_spent_budget_stops_the_judge_and_the_next_run_pays_for_no_call_again(root: Path) -> None:
    earlier = _journals(root)
    async with Judge("dear", by_coin) as judge:
        with pytest.raises(Stopped, match=r"spent of at most \$0\.0300"):
            await _run(root, judge, max_cost=0.03)
        begun, finished = sum(judge.served.values()), _journalled(root, besides=earlier)
        found = await _run(root, judge)

    assert finished, "the budget ends between features"
    assert begun < found.interpreted.manifest["meter"]["calls"] == sum(judge.served.values())
    assert set(judge.served.values()) == {1}


async def test_killed_while_the_judge_works_a_run_repeats_no_finished_feature_and_changes_no_byte(
    root: Path, tmp_path: Path
) -> None:
    async with Judge("steady", by_coin, latency_s=0.02) as judge:
        calm = await _run(root, judge)
        for name in calm.outputs.keys() - {"interpret"}:
            folder = calm.outputs[name].path.name
            shutil.copytree(root / "stages" / folder, tmp_path / "stages" / folder)
        (tmp_path / "cache").symlink_to(root / "cache")
        recipe = tmp_path / "judged.yaml"
        recipe.write_text(yaml.safe_dump(judge.recipe()))
        features = {row_id("missing", [], feature): feature for feature in calm.kept["feature"]}

        process = await asyncio.create_subprocess_exec(
            COMMAND, "run", "-c", recipe, "--direct", "--workspace", tmp_path, stderr=asyncio.subprocess.DEVNULL
        )
        while len(_journalled(tmp_path) & features.keys()) < calm.asked // 3 and process.returncode is None:
            await asyncio.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        finished = {features[row] for row in _journalled(tmp_path) & features.keys()}
        before = _calls_by_feature(judge, features.values())
        again = await _run(tmp_path, judge)
        after = _calls_by_feature(judge, features.values())

    assert calm.asked // 3 <= len(finished) < calm.asked
    assert {feature for feature in features.values() if after[feature] > before[feature]}.isdisjoint(finished)
    assert sum((after - before).values()) < sum(after.values()) / 2
    assert sum(count - 2 for count in judge.served.values()) <= 2, "the calls in flight, of two features at a time"
    assert again.interpreted.content_hash == calm.interpreted.content_hash
    assert again.interpreted.manifest["meter"]["calls"] == calm.interpreted.manifest["meter"]["calls"]


def _journals(root: Path) -> set[Path]:
    return set(root.glob("stages/.journals/interpret-*.sqlite"))


def _journalled(root: Path, *, besides: Collection[Path] = ()) -> set[str]:
    """Ids of the missing features that the judge need not be asked about again, `besides` the journals of others."""
    found: set[str] = set()
    for path in _journals(root).difference(besides):
        with suppress(PermanentError), Journal(path) as journal:  # it may just be created
            found |= journal.keys()
    return found


def _calls_by_feature(judge: Judge, features: Collection[int]) -> Counter[int]:
    return Counter(feature for feature, _ in _asked(judge, features).elements())


def _asked(judge: Judge, features: Collection[int]) -> Counter[tuple[int, int]]:
    """How often each question about a feature was put: (feature, seed), for a request's seed says what it is about."""
    about = {
        derive_seed(0, kind, feature): feature for kind in ("explain", "verify", "relevance") for feature in features
    }
    about |= {
        derive_seed(0, kind, f"{feature}-{number}"): feature
        for kind in ("detection", "fuzzing")
        for feature in features
        for number in range(9)
    }
    return Counter((about[body["seed"]], body["seed"]) for body in judge.bodies if body["seed"] in about)
