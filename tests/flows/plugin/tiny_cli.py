"""Run the real `pipeline` command in a process of its own, with the tiny flow installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("pipeline")


def environment(workspace: Path, home: Path | None = None, **more: str) -> dict[str, str]:
    """The environment of a child: the tiny flow on the path, a home without a history, no Prefect settings of ours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "HEADWATER"))}
    home = home or workspace.parent / "home"
    home.mkdir(exist_ok=True)
    own = {"PYTHONPATH": str(PLUGIN), "HEADWATER_HOME": str(workspace), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **more}


def start(workspace: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start the command; stdout and stderr are pipes of text."""
    return subprocess.Popen(
        [COMMAND, *arguments],
        env=environment(workspace, None, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pipeline(
    workspace: Path, *arguments: str, home: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [COMMAND, *arguments],
        env=environment(workspace, home, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def dataset_bytes(workspace: Path, run: str = "*") -> bytes:
    """The dataset of the newest run (or of `run`, a pattern of run folder names), all shards joined."""
    folder = max(workspace.glob(f"runs/*/{run}"), key=lambda path: (path / "recipe.yaml").stat().st_mtime_ns)
    return b"".join(path.read_bytes() for path in sorted((folder / "dataset").glob("*.parquet")))
