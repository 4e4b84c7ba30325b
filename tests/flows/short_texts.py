"""The shortest of the shipped texts: a small run of FAC Synthesis spends most of its time on a model that reads."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "pipelines" / "data"


def write_shortest(folder: Path, name: str, kinds: Collection[str], rows_of_a_kind: int) -> Path:
    """Write the shortest texts of some kinds of the shipped data `name` into `folder`, kind after kind."""
    rows = [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text("utf-8").splitlines()]
    by_length = sorted(rows, key=lambda row: len(row["text"]))
    short = [row for kind in kinds for row in [row for row in by_length if row["kind"] == kind][:rows_of_a_kind]]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in short), "utf-8")
    return path
