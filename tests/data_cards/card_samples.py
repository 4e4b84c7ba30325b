"""A realistic card, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headwater.data_cards.card import (
    DatasetCard,
    Measure,
    ModelUse,
    RejectCount,
    Source,
    Split,
    StageUse,
    Table,
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("feature", pa.int64()),
        ("activation", pa.float32()),
        ("explanation", pa.string()),
        ("parents", pa.list_(pa.string())),
    ]
)
MEANINGS = {
    "id": "hash of stage, parents and sample",
    "messages": "the conversation, one user turn",
    "feature": "the missing feature this row serves",
    "activation": "its largest activation over the row's tokens",
    "explanation": "what the feature is said to mean | may be empty",
    "parents": "ids of the anchor rows it came from",
}


def make_rows(count: int) -> list[dict[str, Any]]:
    """Rows of SCHEMA; the explanation is null throughout, where an inferred type would go wrong."""
    return [
        {
            "id": f"{number:032x}",
            "messages": [{"role": "user", "content": f"Request {number}: ünïcode, 日本"}],
            "feature": number,
            "activation": number / 4,
            "explanation": None,
            "parents": [],
        }
        for number in range(count)
    ]


def make_card(**changes: Any) -> DatasetCard:
    """The sample card with some fields replaced."""
    facts: dict[str, Any] = {
        "title": "Requests that fill the holes of a seed",
        "summary": "Short user requests written to fire features that the seed never fires.",
        "licence": "apache-2.0",
        "tables": (
            Table(
                arrow_schema=SCHEMA,
                meanings=MEANINGS,
                splits=(Split(name="train", path="data/*.parquet", rows=7, bytes=4096, arrow_bytes=4096),),
            ),
        ),
        "pipeline": "fac-synthesis",
        "how": "Features an anchor fires and the seed does not are looked up, and rows written for them.",
        "stages": (
            StageUse(
                name="fac.synthesise",
                version=2,
                does="writes candidates for every missing feature",
                attempted=1200,
                accepted=900,
                rejected=300,
                fingerprint="0123456789abcdef0123456789abcdef",
            ),
        ),
        "measures": (Measure(name="F_miss fired", before=0.0, after=0.8034, unit="share", hint="null: 12.1%"),),
        "rejects": (RejectCount(stage="fac.synthesise", reason="near_duplicate", count=1234, meaning="MinHash"),),
        "models": (
            ModelUse(role="generator", name="SmolLM2-135M-Instruct", revision="sha256:ab", licence="apache-2.0"),
        ),
        "sources": (Source(role="anchor", name="anchor.jsonl", rows=336, licence="cc0-1.0"),),
        "recipe": {"pipeline": "fac-synthesis", "sae": {"width": 4096}, "engine": {"max_tokens": 64}},
        "command": "pipeline run fac-synthesis -c recipe.yaml",
        "limits": ("A generator of 135M parameters writes silly rows.",),
        "fingerprint": "f" * 64,
        "lineage": (("seed of the run", "0"),),
    }
    return DatasetCard(**(facts | changes))
