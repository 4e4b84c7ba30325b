"""datatrove's InferenceRunner over its own local-socket client, written by its JsonlWriter.

python datatrove_peer.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter


async def rollout(document: Document, generate: Any, **_: Any) -> str:
    result = await generate({"messages": [{"role": "user", "content": document.text}], "seed": int(document.id)})
    return str(result.text)


def documents(calls: int) -> Iterable[Document]:
    return (Document(text=f"row {number}", id=str(number)) for number in range(calls))


def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="fake",
        endpoint_url=base_url.removesuffix("/v1"),
        default_generation_params={"max_tokens": 256},
        max_concurrent_generations=in_flight,
        server_ready_delay_sec=0.1,
    )
    runner = InferenceRunner(
        rollout_fn=rollout,
        config=config,
        output_writer=JsonlWriter(str(folder), output_filename="rows_${rank}.jsonl", compression=None),
    )
    runner.run(documents(calls), rank=0, world_size=1)
    with (folder / "rows_00000.jsonl").open() as file:
        (folder / "rows.json").write_text(json.dumps(sum(1 for _ in file)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
