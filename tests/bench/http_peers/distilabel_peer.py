"""distilabel: a pipeline of one TextGeneration over prompts, saved as JSON lines.

python distilabel_peer.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from distilabel.models import OpenAILLM  # type: ignore[import-not-found]
from distilabel.pipeline import Pipeline  # type: ignore[import-not-found]
from distilabel.steps import LoadDataFromDicts  # type: ignore[import-not-found]
from distilabel.steps.tasks import TextGeneration  # type: ignore[import-not-found]


def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    llm = OpenAILLM(
        model="fake", base_url=base_url, api_key="none", max_retries=6, generation_kwargs={"max_new_tokens": 256}
    )
    with Pipeline(name="ask", cache_dir=folder / "cache") as pipeline:
        prompts = LoadDataFromDicts(
            data=[{"instruction": f"row {number}"} for number in range(calls)], batch_size=in_flight
        )
        prompts >> TextGeneration(llm=llm, input_batch_size=in_flight)
    replies = pipeline.run(use_cache=False)["default"]["train"]
    replies.select_columns(["instruction", "generation"]).to_json(folder / "rows.jsonl")
    with (folder / "rows.jsonl").open() as file:
        (folder / "rows.json").write_text(json.dumps(sum(1 for _ in file)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
