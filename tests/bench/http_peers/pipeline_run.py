"""Headwater as a user runs it: `pipeline run --direct` of a recipe whose row stage asks the server, card and all.

python pipeline_run.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headwater.pipelines.cli import main as pipeline


def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    engine = {"engine": "openai", "base_url": base_url, "model": "fake", "max_concurrency": in_flight}
    recipe = {
        "flow": "ask",
        "pipeline": "ask",
        "prompts": {"rows": calls},
        "generate": {"engine": engine},
    }
    written = folder / "ask.yaml"
    written.write_text(json.dumps(recipe))  # which is YAML, too
    try:
        pipeline(["--workspace", str(folder), "run", "-c", str(written), "--direct"])
    except SystemExit as ended:
        if ended.code:
            raise
    import pyarrow.parquet as pq

    shards = folder.glob("runs/ask/*/dataset/*.parquet")
    (folder / "rows.json").write_text(json.dumps(sum(pq.ParquetFile(shard).metadata.num_rows for shard in shards)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
