"""What a data card says, as frozen values: filled by a pipeline, rendered by `card.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field


class CardPart(BaseModel):
    """Base of the parts: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Split(CardPart):
    name: str
    """`train`, `test` …: word characters only."""
    path: str
    """Where its files lie, relative to the card; a glob: `data/train-*.parquet`."""
    rows: int = Field(ge=0)
    """`datasets` refuses to load files that hold another number."""
    bytes: int = Field(ge=0)
    """Size of its files on disk: what a download takes."""
    arrow_bytes: int = Field(0, ge=0)
    """Size of its rows in memory, which `datasets` calls `num_bytes`; 0 when nobody counted."""


class Table(CardPart):
    """One configuration of the dataset: the rows of one schema."""

    name: str = "default"
    arrow_schema: pa.Schema
    meanings: Mapping[str, str]
    """What each column holds; every column of the schema, and no other, must be explained."""
    splits: tuple[Split, ...] = Field(min_length=1)


class StageUse(CardPart):
    name: str
    version: int
    does: str
    """One sentence."""
    attempted: int
    accepted: int
    rejected: int
    fingerprint: str


class Measure(CardPart):
    """One number before and after the pipeline ran."""

    name: str
    before: float | None
    after: float | None
    unit: str = ""
    """As in `numbers.format_number`: `share` prints as a percentage."""
    hint: str = ""
    """How it is defined, or what stands beside it (the null)."""


class RejectCount(CardPart):
    stage: str
    reason: str
    """The reason code of the rejects."""
    count: int
    meaning: str = ""


class ModelUse(CardPart):
    role: str
    """What it did here: generated, judged, gave the activations."""
    name: str
    revision: str
    licence: str
    engine: str = ""


class Source(CardPart):
    role: str
    """`anchor`, `seed`, …"""
    name: str
    rows: int
    licence: str
    content_hash: str = ""


class DatasetCard(CardPart):
    title: str
    summary: str
    """What the dataset is, in a few sentences of Markdown."""
    licence: str
    """One of `licences.LICENCES`: `apache-2.0`, `cc0-1.0`, `other` …"""
    licence_name: str = ""
    """What a licence that is `other` is called."""
    licence_link: str = ""
    """Where its text is: `LICENSE`, `LICENSE.md` or a URL."""
    languages: tuple[str, ...] = ("en",)
    """ISO 639 codes."""
    task_categories: tuple[str, ...] = ("text-generation",)
    tags: tuple[str, ...] = ()
    """Besides `synthetic` and `headwater`, which are always there."""
    tables: tuple[Table, ...] = Field(min_length=1)
    """The first is the default configuration."""
    pipeline: str
    how: str
    """How it was made, in a few sentences of Markdown."""
    stages: tuple[StageUse, ...]
    measures: tuple[Measure, ...] = ()
    measures_note: str = ""
    rejects: tuple[RejectCount, ...] = ()
    models: tuple[ModelUse, ...] = ()
    sources: tuple[Source, ...] = ()
    recipe: Mapping[str, Any]
    """The resolved recipe. The card replaces values under the name of a secret, shows local paths by their last part,
    and leaves out the addresses of servers."""
    command: str
    """The command line that makes the dataset again from the recipe."""
    limits: tuple[str, ...] = Field(min_length=1)
    """What the dataset and its numbers do not show; a card without limits isn't honest."""
    fingerprint: str
    lineage: tuple[tuple[str, str], ...] = ()
    """Further facts for the last section: seed of the run, library versions, date."""
