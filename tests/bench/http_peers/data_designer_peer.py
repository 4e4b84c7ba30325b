"""NVIDIA's DataDesigner: a text column over a seed file of prompts, in one row group, which it writes as Parquet.

The clock stops when that is on disk: then it profiles the dataset, which wants a file from the network.

python data_designer_peer.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["NEMO_TELEMETRY_ENABLED"] = "false"  # read when it is imported

import data_designer.config as dd  # type: ignore[import-not-found]
from data_designer.interface import DataDesigner  # type: ignore[import-not-found]
from pyarrow import parquet


def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    seeds = folder / "prompts.jsonl"
    seeds.write_text("".join(json.dumps({"prompt": f"row {number}"}) + "\n" for number in range(calls)))
    asked = dd.ChatCompletionInferenceParams(max_tokens=256, max_parallel_requests=in_flight)
    model = dd.ModelConfig(
        alias="fake", model="fake", provider="here", inference_parameters=asked, skip_health_check=True
    )
    builder = dd.DataDesignerConfigBuilder(model_configs=[model])
    builder.with_seed_dataset(dd.LocalFileSeedSource(path=str(seeds)))
    builder.add_column(dd.LLMTextColumnConfig(name="text", model_alias="fake", prompt="{{ prompt }}"))
    here = dd.ModelProvider(name="here", endpoint=base_url, api_key="none")
    designer = DataDesigner(artifact_path=folder / "artifacts", model_providers=[here])
    designer.set_run_config(dd.RunConfig(buffer_size=calls))

    def written(shard: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(parquet.ParquetFile(shard).metadata.num_rows))

    designer.create(builder, num_records=calls, on_batch_complete=written)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
