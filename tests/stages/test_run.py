"""One stage: reused when nothing changed, made anew with a reason when something did, never empty in silence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pytest
from pydantic import ValidationError
from sample_stages import (
    Ask,
    AskConfig,
    Numbers,
    NumbersConfig,
    Pool,
    RemoteEngine,
    Total,
    TotalConfig,
    context,
    cut,
    notes,
)

from headwater.core.errors import ConfigError, PermanentError, Stopped
from headwater.core.fingerprint import differences
from headwater.core.rows import schema
from headwater.core.store import OutputWriter, StageOutput
from headwater.llm.types import EngineIdentity
from headwater.stages.base import Knob, StageConfig, StageContext, TableStage, fingerprint_view
from headwater.stages.run import check_columns, find_output, fingerprint_of, run_stage


def _numbers(root: Path, seed: int = 0, **config: Any) -> Any:
    return run_stage(Numbers(NumbersConfig(**config)), {}, context(root, seed=seed))


def _manifest_bytes(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.glob("stages/*/manifest.json"))}


def test_the_second_run_reuses_the_output_and_touches_nothing(tmp_path: Path) -> None:
    first = _numbers(tmp_path)
    before = _manifest_bytes(tmp_path)
    second = _numbers(tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert first.output.path == second.output.path
    assert _manifest_bytes(tmp_path) == before


def test_a_knob_changes_nothing_and_a_setting_is_named_when_it_changed(tmp_path: Path) -> None:
    _numbers(tmp_path, rows=10)
    assert _numbers(tmp_path, rows=10, threads=8).reused
    assert notes(tmp_path) == []
    assert not _numbers(tmp_path, rows=11).reused
    assert notes(tmp_path) == ["made anew because of config.rows: 10 → 11"]


def test_what_was_made_with_the_old_setting_is_still_there(tmp_path: Path) -> None:
    _numbers(tmp_path, rows=10)
    _numbers(tmp_path, rows=11)
    assert _numbers(tmp_path, rows=10).reused


def test_the_seed_and_the_inputs_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    pool = Pool(engine=RemoteEngine)
    few, many = _numbers(tmp_path, rows=3).output, _numbers(tmp_path, rows=4).output
    stage = Ask(AskConfig())
    prints = {fingerprint_of(stage, {"rows": rows}, seed, pool).digest for rows in (few, many) for seed in (0, 1)}
    assert len(prints) == 4


def test_the_identity_of_the_engine_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    class Newer(RemoteEngine):
        @property
        def identity(self) -> EngineIdentity:
            return replace(super().identity, revision="2")

    rows = {"rows": _numbers(tmp_path).output}
    old, new = (fingerprint_of(Ask(AskConfig()), rows, 0, Pool(engine=engine)) for engine in (RemoteEngine, Newer))
    assert differences(old.parts, new.parts) == ["models.engine.revision: 1 → 2"]


def test_knobs_stay_out_at_every_depth() -> None:
    class Inner(StageConfig):
        k: int = 1
        threads: int = Knob(1)

    class Outer(StageConfig):
        one: Inner = Inner()
        some: tuple[Inner, ...] = (Inner(),)
        named: dict[str, Inner] = {"a": Inner()}  # noqa: RUF012 - pydantic copies it
        maybe: Inner | None = None
        device: str = Knob("cpu")

    assert fingerprint_view(Outer()) == {"one": {"k": 1}, "some": [{"k": 1}], "named": {"a": {"k": 1}}, "maybe": None}


def test_a_config_refuses_unknown_keys_and_numbers_that_json_lacks() -> None:
    with pytest.raises(ValidationError, match="rowz"):
        NumbersConfig(rowz=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="max_reject_share"):
        NumbersConfig(max_reject_share=float("nan"))


def test_a_damaged_output_is_set_aside_and_made_anew(tmp_path: Path) -> None:
    first = _numbers(tmp_path)
    shard = first.output.data_files[0]
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + b"?")
    again = _numbers(tmp_path)
    assert not again.reused
    assert again.output.path == first.output.path
    assert again.output.data_files[0].read_bytes() == good
    assert any("did not match its manifest" in note for note in notes(tmp_path))
    assert len(list(tmp_path.glob("stages/.damaged-*"))) == 1


def test_columns_are_checked_before_anything_runs(tmp_path: Path) -> None:
    stage = Ask(AskConfig())
    check_columns(stage, "ask.it", {"rows": ("id", "number", "more")})
    with pytest.raises(ConfigError, match=r"'ask\.it' has no input 'rows'"):
        check_columns(stage, "ask.it", {})
    with pytest.raises(ConfigError, match=r"needs the columns \['number'\] of its input 'rows', which has \['id'\]"):
        check_columns(stage, "ask.it", {"rows": ("id",)})
    with pytest.raises(ConfigError, match=r"needs the columns \['id'\]"):
        check_columns(stage, "ask.it", {"rows": ("number",)})
    with pytest.raises(ConfigError, match="'text'"):
        run_stage(Total(TotalConfig()), dict.fromkeys(("near", "far"), _numbers(tmp_path).output), context(tmp_path))


def test_rejects_are_counted_with_their_reasons(tmp_path: Path) -> None:
    output = _numbers(tmp_path, rows=10, reject_every=5).output
    assert output.manifest["counts"] == {"attempted": 10, "accepted": 8, "rejected": 2, "owed": 0}
    assert output.manifest["reasons"] == {"round": 2}
    assert output.rejects()["raw"].to_list() == ["0", "5"]


def test_too_many_rejects_are_an_error_and_can_be_looked_at(tmp_path: Path) -> None:
    _numbers(tmp_path, rows=10, reject_every=2, max_reject_share=0.5)
    with pytest.raises(
        PermanentError, match=r"rejected 5 of 10 rows \(round 5\), more than its limit of 40%"
    ) as caught:
        _numbers(tmp_path, rows=10, reject_every=2, max_reject_share=0.4)
    (kept,) = tmp_path.glob("stages/.failed-numbers-*")
    assert str(kept) in caught.value.todo
    assert pl.read_parquet(kept / "*.parquet")["raw"].to_list() == ["0", "2", "4", "6", "8"]
    assert len(list(tmp_path.glob("stages/*/manifest.json"))) == 1
    assert list(tmp_path.glob("stages/.unfinished-*")) == []


def test_an_empty_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="Stage node produced no rows"):
        _numbers(tmp_path, rows=0)
    with pytest.raises(PermanentError, match=r"4 attempted, all rejected \(round 4\)"):
        _numbers(tmp_path, rows=4, reject_every=1)


class _MayBeEmptyAsk(Ask):
    may_be_empty = True


class _MayBeEmptyTotal(Total):
    may_be_empty = True


class _Lines(TableStage[StageConfig]):
    """Takes what is there."""

    name = "lines"
    version = 1
    inputs: ClassVar[Mapping[str, Any]] = {"rows": ("line",)}

    @property
    def output(self) -> pa.Schema:
        return schema(line=pa.string())

    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        out.write(inputs["rows"].read())


def test_an_empty_result_names_the_stage_before_it_where_the_rows_were_lost(tmp_path: Path) -> None:
    """The answers were cut; the table made of none of them is empty by right, and the stage after it is not."""
    pool = Pool(engine=lambda: RemoteEngine(cut))
    numbers = _numbers(tmp_path, rows=20).output
    answers = run_stage(_MayBeEmptyAsk(AskConfig()), {"rows": numbers}, context(tmp_path, pool, node="answers")).output
    both = {"near": answers, "far": answers}
    lines = run_stage(_MayBeEmptyTotal(TotalConfig()), both, context(tmp_path, node="both")).output
    with pytest.raises(PermanentError) as caught:
        run_stage(_Lines(StageConfig()), {"rows": lines}, context(tmp_path, node="lines"))
    assert caught.value.what == (
        "Stage lines produced no rows. Before it, answers kept 0 of 20 (cut_at_length 19, unlucky 1)."
    )
    assert "`pipeline rows RUN --stage answers --rejects`" in caught.value.todo


def test_an_empty_result_blames_no_stage_that_left_it_enough(tmp_path: Path) -> None:
    pool = Pool(engine=lambda: RemoteEngine(cut))
    numbers = _numbers(tmp_path, rows=40, reject_every=2).output
    with pytest.raises(
        PermanentError, match=r"no rows: 20 attempted, all rejected \(cut_at_length 19, unlucky 1\)\."
    ) as e:
        run_stage(Ask(AskConfig()), {"rows": numbers}, context(tmp_path, pool, node="answers"))
    assert "Before it" not in e.value.what and "pipeline rows" not in e.value.todo


def test_an_empty_result_is_a_result_where_the_stage_says_so(tmp_path: Path) -> None:
    class MayBeEmpty(Numbers):
        may_be_empty = True

    output = run_stage(MayBeEmpty(NumbersConfig(rows=0)), {}, context(tmp_path)).output
    assert output.read().columns == ["id", "number"]
    assert output.rows == 0


class _Failing(Numbers):
    def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
        super().run(inputs, out, context)
        raise PermanentError("It broke.")


def test_a_failed_stage_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="It broke"):
        run_stage(_Failing(NumbersConfig()), {}, context(tmp_path))
    assert [path.name for path in (tmp_path / "stages").iterdir()] == [".locks"]


class _Undeclared(Numbers):
    @property
    def output(self) -> pa.Schema:
        return schema(number=pa.string())


def test_a_stage_that_breaks_its_own_schema_is_told(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="column 'number' is int64, declared string"):
        run_stage(_Undeclared(NumbersConfig()), {}, context(tmp_path))


def test_a_stop_is_heeded_before_the_stage_begins(tmp_path: Path) -> None:
    class Polite(Numbers):
        def run(self, inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext) -> None:
            context.progress(0, 1)

    stopped = context(tmp_path)
    stopped.stop.set()
    with pytest.raises(Stopped, match="everything finished is kept"):
        run_stage(Polite(NumbersConfig()), {}, stopped)


def test_the_manifest_tells_where_the_rows_came_from(tmp_path: Path) -> None:
    numbers = _numbers(tmp_path, rows=3).output
    done = run_stage(Ask(AskConfig()), {"rows": numbers}, context(tmp_path, Pool(engine=RemoteEngine), node="ask.it"))
    manifest = json.loads((done.output.path / "manifest.json").read_text())
    assert manifest["node"] == "ask.it"
    assert manifest["parents"] == {"rows": numbers.path.name}
    assert manifest["models"]["engine"]["model"] == "of-the-request"
    assert manifest["fingerprint"]["digest"] == done.fingerprint.digest
    assert manifest["fingerprint"]["parts"]["inputs"] == {"rows": numbers.content_hash}
    assert manifest["seed"] == 0
    assert manifest["libraries"]["pyarrow"] == pa.__version__
    assert manifest["meter"] == {
        "calls": 3,
        "tokens_in": 30,
        "tokens_cached": 12,
        "tokens_out": 15,
        "seconds": manifest["meter"]["seconds"],
        "dollars": 0.0,
    }
    assert manifest["schema"] == {"id": "string", "number": "int64", "text": "string", "seed": "int64"}


def test_a_journal_left_by_a_crash_after_publishing_is_removed(tmp_path: Path) -> None:
    rows = {"rows": _numbers(tmp_path, rows=3).output}
    here = context(tmp_path, Pool(engine=RemoteEngine))
    done = run_stage(Ask(AskConfig()), rows, here)
    journal = here.workspace.journal_path("ask", done.fingerprint)
    assert not journal.exists()
    journal.write_bytes(b"left behind")
    assert run_stage(Ask(AskConfig()), rows, here).reused
    assert not journal.exists()


def test_find_output_looks_without_making(tmp_path: Path) -> None:
    fingerprint, output = find_output(Numbers(NumbersConfig()), {}, context(tmp_path))
    assert output is None
    assert not (tmp_path / "stages").exists()
    assert _numbers(tmp_path).fingerprint.digest == fingerprint.digest


def test_two_processes_that_need_the_same_output_make_it_once(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from sample_stages import Numbers, NumbersConfig, context\n"
        "from headwater.stages.run import run_stage\n"
        "class Slow(Numbers):\n"
        "    def run(self, *given):\n"
        "        time.sleep(0.7)\n"
        "        super().run(*given)\n"
        "done = run_stage(Slow(NumbersConfig()), {}, context(pathlib.Path(sys.argv[1])))\n"
        "print(done.reused, done.output.rows)\n"
    )
    folder = tmp_path / "scripts"
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "sample_stages.py", folder)
    (folder / "slow.py").write_text(script)
    command = [sys.executable, str(folder / "slow.py"), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[0] for process in both)
    assert said == ["False 10\n", "True 10\n"]
    assert len([note for note in notes(tmp_path) if note.startswith("waiting for process ")]) == 1
