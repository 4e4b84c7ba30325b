"""The run folder: what one run was asked to do, what it made, and where it stands; all of it read from disk."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headwater.core.errors import ConfigError
from headwater.core.locks import file_lock
from headwater.core.redact import redact_values
from headwater.core.store import StageOutput, Workspace, load_output
from headwater.flows.suggest import did_you_mean

_STATE = "run.json"
"""Not `state.json`: by that name `datasets` would take the run folder for a dataset saved to disk, and refuse it."""
_ALIVE = ".alive"

_held: dict[Path, contextlib.ExitStack] = {}
"""Run folders of this process → what holds their `.alive` file locked."""


@dataclass(frozen=True)
class Run:
    """A run folder: `recipe.yaml`, `run.json`, `events.jsonl`, `lineage.json`, `dataset/`, card and report."""

    path: Path

    @property
    def pipeline(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        """`pipeline/time`: what the commands call the run."""
        return f"{self.pipeline}/{self.path.name}"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def recipe(self) -> dict[str, Any]:
        return self._read("recipe.yaml", yaml.safe_load)

    @property
    def state(self) -> dict[str, Any]:
        return self._read(_STATE, json.loads, "status")

    @property
    def status(self) -> str:
        """`running`, `done`, `failed`, `stopped`, or `killed`: it says running but its process is gone."""
        status = str(self.state["status"])
        if status == "running" and not _is_held(self.path / _ALIVE):
            return "killed"
        return status

    def set_state(self, status: str, **facts: Any) -> None:
        write_atomically(self.path / _STATE, json.dumps({"status": status, "pid": os.getpid(), **facts}, indent=1))
        if status != "running":
            _release(self.path)

    @property
    def lineage(self) -> dict[str, Any]:
        """Node → its stage output folder, fingerprint and parents; empty before the first stage has finished."""
        path = self.path / "lineage.json"
        if not path.exists():
            return {}
        return self._read(path.name, json.loads)

    def _read(self, name: str, parse: Callable[[str], Any], *needed: str) -> dict[str, Any]:
        """The mapping in one of the run's own files."""
        try:
            values = parse((self.path / name).read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise self._damaged(name, " ".join(str(error).split())) from error
        if not isinstance(values, dict):
            raise self._damaged(name, "it holds no mapping")
        if missing := [key for key in needed if key not in values]:
            raise self._damaged(name, f"it has no {missing[0]!r}")
        return values

    def _damaged(self, name: str, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path / name} can't be read: {why}.",
            todo="The dataset beside it and the finished stages are untouched. Run the pipeline again for a run that "
            "reuses them; then this folder may go.",
        )

    def set_lineage(self, lineage: Mapping[str, Any]) -> None:
        write_atomically(self.path / "lineage.json", json.dumps(lineage, indent=1))

    def output(self, workspace: Workspace, node: str) -> StageOutput:
        """The finished output of a node of this run."""
        if node not in self.lineage:
            raise ConfigError(
                f"Run {self.name} has no finished stage {node!r}.",
                todo=f"{did_you_mean(node, self.lineage)}It has: {', '.join(self.lineage) or 'none yet'}.",
            )
        output = load_output(workspace.stages / self.lineage[node]["output"])
        if output is None:
            raise ConfigError(
                f"The output of stage {node!r} is gone or damaged.", todo="Run the pipeline again to make it anew."
            )
        return output


def create_run(workspace: Workspace, pipeline: str, recipe: Mapping[str, Any]) -> Run:
    """A new run folder named by the time; a name already taken gets a suffix.

    The run counts as alive until its state is set to something final or this process ends.
    """
    try:
        path = _new_folder(workspace.runs / pipeline, time.strftime("%Y-%m-%dT%H-%M-%S"))
        text = yaml.safe_dump(redact_values(recipe), sort_keys=False, allow_unicode=True)
        write_atomically(path / "recipe.yaml", text)
        _hold(path)
        run = Run(path)
        run.set_state("running", started=time.time())
    except OSError as error:
        raise ConfigError(
            f"The workspace {workspace.root} can't be written: {error.strerror}.",
            todo="Mend that, or give another folder with --workspace.",
        ) from error
    return run


def find_run(workspace: Workspace, name: str | None) -> Run:
    """The run called `pipeline/time` or `pipeline` (its newest), or the newest of all."""
    candidates = [path for path in workspace.runs.glob("*/*") if (path / _STATE).exists() and not path.is_symlink()]
    there = sorted({path.parent.name for path in candidates})
    if name:
        wanted = name.strip("/")
        candidates = [
            path for path in candidates if wanted in (path.parent.name, f"{path.parent.name}/{path.name}", path.name)
        ]
    if not candidates:
        raise ConfigError(
            f"No run {name!r} in {workspace.runs}." if name else f"No run yet in {workspace.runs}.",
            todo=f"{did_you_mean(name or '', there)}There are runs of: {', '.join(there)}."
            if there
            else "Start one with `pipeline run NAME`.",
        )
    return Run(max(candidates, key=_begun))


def _begun(path: Path) -> int:
    """When the run in this folder began: its recipe is the first file and never written again."""
    recipe = path / "recipe.yaml"
    return (recipe if recipe.exists() else path).stat().st_mtime_ns


def link_dataset(run: Run, output: StageOutput) -> None:
    """Put the dataset's shards into the run folder: hard links where the file system allows, else copies."""
    folder = run.path / "dataset"
    folder.mkdir(exist_ok=True)
    files = output.data_files
    for i, source in enumerate(files):
        target = folder / f"train-{i:05d}-of-{len(files):05d}.parquet"
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old text or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _new_folder(parent: Path, stamp: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        try:
            (parent / f"{stamp}{suffix}").mkdir()
        except FileExistsError:
            continue
        return parent / f"{stamp}{suffix}"
    raise AssertionError("unreachable: the suffixes don't end")


def _hold(folder: Path) -> None:
    """Lock the run's `.alive` file. The kernel lets go when the process ends, however it ends; a pid gets reused."""
    stack = contextlib.ExitStack()
    stack.enter_context(file_lock(folder / _ALIVE))
    _held[folder] = stack


def _release(folder: Path) -> None:
    stack = _held.pop(folder, None)
    if stack is not None:
        stack.close()


def _is_held(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
