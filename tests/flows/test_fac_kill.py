"""FAC Synthesis as a user runs it: killed, stopped, started twice at once, with Prefect and without; always one result.

Every run is a process of its own and uses the real model; all 18 stages of the pipeline take part.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_cli import environment

from headwater.core.events import read_events
from headwater.tests.flows.short_texts import write_shortest
from headwater.tests.waiting import wait_until

pytest.importorskip("torch", reason="the extra `local` is not installed")

KILLS = 5
KINDS = {"anchor": ("poem", "sql_query", "email", "translation", "regex", "recipe"), "seed": ("email",)}
ROWS_OF_A_KIND = {"anchor": 2, "seed": 3}
RECIPE = {
    "flow": "fac-synthesis",
    "pipeline": "small",
    "anchor": {"source": "anchor.jsonl"},
    "seed_data": {"source": "seed.jsonl"},
    "measure": {"layer": 2},
    "sae": {"train": {"width": 256, "k": 8, "steps": 20, "batch_tokens": 64}},
    "missing": {"limit": 3, "test": "set_difference", "delta_quantile": 0.3, "min_support": 1},
    "synthesis": {
        "candidates": 2,
        "generations": 2,
        "examples": 2,
        "max_reject_share": 1.0,
        "sampling": {"max_tokens": 24, "stop": ["\n", "."]},
    },
    "reply": {"sampling": {"max_tokens": 16, "stop": ["\n", "."]}, "max_reject_share": 1.0},
    "coverage": {"sweep": [0.5], "draws": 15},
}
STAGES = 18


class Pipelines:
    """`pipeline run` of one recipe, each time in a process of its own."""

    def __init__(self, server: subprocess.Popen[str], recipe: Path, models: Path) -> None:
        self._server = server
        self._recipe = recipe
        self._models = models

    def start(self, root: Path, *flags: str) -> int:
        """Start a run in the workspace `root`; its pid."""
        if not root.exists():
            (root / "cache").mkdir(parents=True)
            (root / "cache" / "models").symlink_to(self._models)
        arguments = json.dumps(["--workspace", str(root), "run", "-c", str(self._recipe), *flags])
        return int(self._ask(f"start {root.with_suffix('.log')} {arguments}"))

    def wait(self, pid: int) -> int:
        """The exit code of a run; negative when a signal ended it."""
        return int(self._ask(f"wait {pid}"))

    def run(self, root: Path, *flags: str) -> None:
        """Run to a good end."""
        code = self.wait(self.start(root, *flags))
        assert code == 0, root.with_suffix(".log").read_text()

    def kill_at(self, root: Path, stage: str, delay: float, *flags: str, number: int = signal.SIGKILL) -> int:
        """Start a run, send it a signal so many seconds after `stage` began, and give the exit code."""
        before = set(_runs(root))
        pid = self.start(root, *flags)
        wait_until(lambda: _began(set(_runs(root)) - before, stage) or _is_over(pid))
        time.sleep(delay)
        os.kill(pid, number)
        return self.wait(pid)

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


@pytest.fixture(scope="module")
def pipelines(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipelines]:
    folder = tmp_path_factory.mktemp("recipe")
    for name, kinds in KINDS.items():
        write_shortest(folder, name, kinds, ROWS_OF_A_KIND[name])
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    script = Path(__file__).with_name("fork_pipeline.py")
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=environment(folder / "unused", OMP_NUM_THREADS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Pipelines(server, folder / "small.yaml", embedded_cache / "models")
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def calm(pipelines: Pipelines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one run that nothing disturbed."""
    root = tmp_path_factory.mktemp("calm") / "workspace"
    pipelines.run(root, "--direct")
    assert len(_lineage(root)) == STAGES
    assert _lineage(root)["dataset"]["rows"] > 0
    return root


def test_killed_again_and_again_the_run_ends_in_the_same_bytes(
    pipelines: Pipelines, calm: Path, tmp_path: Path
) -> None:
    root, chance = tmp_path / "workspace", random.Random(4)
    seconds = {node: _manifest(calm, output["output"])["seconds"] for node, output in _lineage(calm).items()}
    victims = sorted(chance.sample(range(STAGES), KILLS))
    for victim in victims:
        node = list(seconds)[victim]
        finished = _finished(root)
        code = pipelines.kill_at(root, node, chance.random() * seconds[node], "--direct")
        assert code == -signal.SIGKILL, f"the kill in {node} came too late"
        assert finished.items() <= _finished(root).items(), f"the kill in {node} cost what was finished"
    pipelines.run(root, "--direct")

    assert _result(root) == _result(calm)
    assert _left_over(root) == []


def test_killed_under_prefect_and_run_again_twice_at_once_everything_is_made_once(
    pipelines: Pipelines, calm: Path, tmp_path: Path
) -> None:
    """One of the two is direct: they wait for one another, and give the same bytes as a run that had peace."""
    root = _begun(calm, tmp_path)
    assert pipelines.kill_at(root, "texts.1", 0.1) == -signal.SIGKILL
    assert (root / "prefect" / "prefect.db").exists()
    finished = _finished(root)
    killed = _runs(root)

    both = [pipelines.start(root, *flags) for flags in (["--direct"], [])]
    assert [pipelines.wait(pid) for pid in both] == [0, 0], root.with_suffix(".log").read_text()

    assert finished.items() <= _finished(root).items()
    runs = [run for run in _runs(root) if run not in killed]
    assert len(runs) == 2
    stages = list(_lineage(calm))
    assert _started(runs) == dict.fromkeys(stages[stages.index("texts.1") :], 1)
    assert [_result(root, run) for run in runs] == [_result(calm)] * 2
    assert _left_over(root) == []


def test_stopped_by_ctrl_c_once_or_twice_it_keeps_what_was_finished(
    pipelines: Pipelines, calm: Path, tmp_path: Path
) -> None:
    root = _begun(calm, tmp_path)
    assert pipelines.kill_at(root, "texts.1", 0.0, "--direct", number=signal.SIGINT) == 130
    finished = _finished(root)
    assert "prompts.1" in _lineage(root)
    pid = pipelines.start(root, "--direct")
    wait_until(lambda: _began(set(_runs(root)[1:]), "texts.2"))
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: "once more stops at once" in (_runs(root)[-1] / "events.jsonl").read_text())
    os.kill(pid, signal.SIGINT)
    assert pipelines.wait(pid) == 130
    assert finished.items() <= _finished(root).items()
    assert [json.loads((run / "run.json").read_text())["status"] for run in _runs(root)] == ["stopped", "stopped"]

    pipelines.run(root, "--direct")

    assert finished.items() <= _finished(root).items()
    assert _result(root) == _result(calm)


def _begun(calm: Path, folder: Path) -> Path:
    """A new workspace that has the outputs of `calm` up to the SAE, which takes longest."""
    root = folder / "workspace"
    (root / "cache").mkdir(parents=True)
    (root / "cache" / "models").symlink_to((calm / "cache" / "models").resolve())
    for node in ("anchor", "seed", "space"):
        name = _lineage(calm)[node]["output"]
        shutil.copytree(calm / "stages" / name, root / "stages" / name)
    return root


def _started(runs: list[Path]) -> Counter[str]:
    """How often every stage was made by one of `runs`."""
    events = (event for run in runs for event in read_events(run / "events.jsonl"))
    return Counter(event["stage"] for event in events if event["kind"] == "stage_started")


def _runs(root: Path) -> list[Path]:
    """The run folders that know their recipe, the oldest first."""
    recipes = root.glob("runs/small/*/recipe.yaml")
    return [path.parent for path in sorted(recipes, key=lambda path: path.stat().st_mtime_ns)]


def _lineage(root: Path, run: Path | None = None) -> dict[str, Any]:
    lineage: dict[str, Any] = json.loads(((run or _runs(root)[-1]) / "lineage.json").read_text())
    return lineage


def _manifest(root: Path, output: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((root / "stages" / output / "manifest.json").read_text())
    return manifest


def _result(root: Path, run: Path | None = None) -> dict[str, bytes]:
    """All bytes that a run is for: its dataset and card, and the rows, rejects and artifacts of every stage."""
    run = run or _runs(root)[-1]
    found = {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "dataset").iterdir())}
    found["README.md"] = (run / "README.md").read_bytes()
    for node, output in _lineage(root, run).items():
        folder = root / "stages" / output["output"]
        for name in _manifest(root, output["output"])["files"]:
            if name != "metrics.json":
                found[f"{node}/{output['output']}/{name}"] = (folder / name).read_bytes()
    return found


def _finished(root: Path) -> dict[str, tuple[int, int]]:
    """Every published output and which publication it is: one made anew has another."""
    manifests = {path.parent.name: path.stat() for path in root.glob("stages/[!.]*/manifest.json")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in manifests.items()}


def _left_over(root: Path) -> list[str]:
    """What kills left beside the outputs."""
    found = [*root.glob("stages/.unfinished-*"), *root.glob("stages/.damaged-*"), *root.glob("stages/.journals/*")]
    return sorted(path.name for path in found)


def _began(runs: set[Path], stage: str) -> bool:
    return _started(list(runs))[stage] > 0


def _is_over(pid: int) -> bool:
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
