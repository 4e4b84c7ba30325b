"""The command itself: how long `pipeline --help` takes, and a run of 10,000 rows whose stages are all there already.

    python tests/bench/bench_cli.py [--rows 10000] [--rounds 5]

The bare minimum beside them, in the same rounds: an interpreter that imports click and ends. The 10,000 rows go through
the whole of FAC Synthesis once (two blocks of the embedded model, eight tokens a row), then the same command is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

Command = Sequence[str | Path]
_PIPELINE = Path(sys.executable).with_name("pipeline")
_RECIPE = """
flow: fac-synthesis
pipeline: bench
anchor: {source: anchor.jsonl}
seed_data: {source: seed.jsonl}
measure: {layer: 1, max_tokens: 8}
sae: {train: {width: 256, k: 8, steps: 20}}
missing: {limit: 2}
synthesis: {candidates: 2, generations: 2, max_reject_share: 1.0}
reply: {engine: null}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = _prepare(Path(folder), given.rows)
        sides: dict[str, Command] = {
            "bare: import click": [sys.executable, "-c", "import click"],
            "pipeline --help (at most 0.5 s)": [_PIPELINE, "--help"],
            f"reused run, {given.rows:,} rows (at most 2 s)": run,
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, command in sides.items():
                seconds[name].append(_timed(command, Path(folder)))
    bare = statistics.median(next(iter(seconds.values())))
    for name, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{name:<42} {median:6.2f} s  {median / bare:6.1f} times bare")


def _prepare(folder: Path, rows: int) -> Command:
    """Run once, so that everything can be reused; returns the command."""
    kinds = ("a letter to", "a recipe for", "a poem about", "a bug in")
    for name, kept in (("anchor", kinds), ("seed", kinds[:2])):
        lines = (json.dumps({"text": f"{kept[n % len(kept)]} number {n}"}) for n in range(rows // 2))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "bench.yaml").write_text(_RECIPE, "utf-8")
    command: Command = [_PIPELINE, "run", "bench", "-c", "bench.yaml", "--direct", "--workspace", "workspace"]
    print(f"first run of {rows:,} rows: {_timed(command, folder):.0f} s")
    return command


def _timed(command: Command, folder: Path) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
