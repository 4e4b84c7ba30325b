"""bespokelabs-curator: a dataset of prompts through `curator.LLM` with its OpenAI backend, saved as JSON lines.

python curator_peer.py BASE_URL CALLS IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TELEMETRY_ENABLED"] = "false"  # these three are read at import
os.environ["CURATOR_VIEWER"] = "0"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

# Brings the file that its counter of tokens would fetch.
import litellm.litellm_core_utils.default_encoding  # type: ignore[import-not-found]  # noqa: F401
from bespokelabs import curator  # type: ignore[import-not-found]
from datasets import Dataset

UNLIMITED = 10**9


class Asker(curator.LLM):  # type: ignore[misc]
    def prompt(self, row: dict[str, str]) -> str:
        return row["prompt"]

    def parse(self, row: dict[str, str], response: str) -> dict[str, str]:
        return {**row, "text": response}


def main(base_url: str, calls: int, in_flight: int, folder: Path) -> None:
    asker = Asker(
        model_name="fake",
        backend="openai",
        generation_params={"max_tokens": 256},
        backend_params={
            "base_url": base_url,
            "api_key": "none",
            "max_concurrent_requests": in_flight,
            "max_requests_per_minute": UNLIMITED,
            "max_tokens_per_minute": UNLIMITED,
        },
    )
    prompts = Dataset.from_list([{"prompt": f"row {number}"} for number in range(calls)])
    replies = asker(prompts, working_dir=str(folder / "cache")).dataset
    replies.to_json(folder / "rows.jsonl")
    with (folder / "rows.jsonl").open() as file:
        (folder / "rows.json").write_text(json.dumps(sum(1 for _ in file)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
