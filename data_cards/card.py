"""The data card: a README.md whose YAML block the Hub and `datasets` read, and whose text a person reads.

`render_card` writes a new one; `merge_card` puts it into a card that people may have edited.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.core.redact import redact_text, redact_values
from headwater.data_cards.card_merge import BEGIN, END, dump_front_matter, mark, merge_card
from headwater.data_cards.card_types import (
    DatasetCard,
    Measure,
    ModelUse,
    RejectCount,
    Source,
    Split,
    StageUse,
    Table,
)
from headwater.data_cards.features import features_of, type_label
from headwater.data_cards.numbers import format_number
from headwater.data_cards.places import without_places

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BEGIN",
    "END",
    "DatasetCard",
    "Measure",
    "ModelUse",
    "RejectCount",
    "Source",
    "Split",
    "StageUse",
    "Table",
    "card_metadata",
    "merge_card",
    "render_card",
    "size_category",
]

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
_LARGER_SIZES = ((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"))
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_BACKTICKS = re.compile(r"`{3,}")


def render_card(card: DatasetCard) -> str:
    """The whole README.md of a new dataset: YAML block, then the text inside Headwater's own markers.

    Raises ConfigError for a column that isn't explained, a split name or a column type that `datasets` refuses.
    """
    metadata = card_metadata(card)
    return redact_text(dump_front_matter(metadata) + "\n" + mark(_body(card), metadata))


def card_metadata(card: DatasetCard) -> dict[str, Any]:
    """The YAML block of the card, as the Hub's dataset card specification names its keys."""
    for table in card.tables:
        _check(table)
    infos = [_dataset_info(table) for table in card.tables]
    return {
        "pretty_name": card.title,
        "license": card.licence,
        **({"license_name": card.licence_name} if card.licence_name else {}),
        **({"license_link": card.licence_link} if card.licence_link else {}),
        "language": list(card.languages),
        "task_categories": list(card.task_categories),
        "tags": list(dict.fromkeys(("synthetic", "headwater", *card.tags))),
        "size_categories": [size_category(sum(split.rows for split in card.tables[0].splits))],
        "configs": [_config(table, default=table is card.tables[0]) for table in card.tables],
        "dataset_info": infos[0] if len(infos) == 1 else infos,
    }


def size_category(rows: int) -> str:
    """The Hub's name for the order of magnitude of a number of rows."""
    for limit, name in (*_SIZES, *_LARGER_SIZES):
        if rows < limit:
            return name
    return "10B<n<100B" if rows < 10**11 else "100B<n<1T"


def _config(table: Table, *, default: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"config_name": table.name}
    if default and table.name != "default":
        entry["default"] = True
    return {**entry, "data_files": [{"split": split.name, "path": split.path} for split in table.splits]}


def _dataset_info(table: Table) -> dict[str, Any]:
    return {
        "config_name": table.name,
        "features": features_of(table.arrow_schema),
        "splits": [
            {"name": split.name, "num_bytes": split.arrow_bytes, "num_examples": split.rows} for split in table.splits
        ],
        "download_size": sum(split.bytes for split in table.splits),
        "dataset_size": sum(split.arrow_bytes for split in table.splits),
    }


def _check(table: Table) -> None:
    unexplained = set(table.arrow_schema.names).symmetric_difference(table.meanings)
    if unexplained:
        raise ConfigError(
            f"The columns of table {table.name!r} and their explanations differ in {sorted(unexplained)}.",
            todo="Explain every column of the schema in `meanings`, and no other.",
        )
    for split in table.splits:
        if _SPLIT_NAME.fullmatch(split.name) is None:
            raise ConfigError(
                f"{split.name!r} can't name a split of table {table.name!r}.",
                todo="Use letters, digits, underscores and dots only.",
            )


def _body(card: DatasetCard) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("headwater.data_cards"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"number": format_number, "cell": _cell, "columns": _columns, "fenced": _fenced}
    whole = redact_values(card.recipe)
    published = without_places(whole)
    text = environment.get_template("card.md.j2").render(
        card=card, recipe=_yaml(published), shortened=published != whole
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _columns(table: Table) -> Iterator[tuple[str, str, str]]:
    for field in table.arrow_schema:
        yield field.name, type_label(field.type), table.meanings[field.name]


def _cell(text: str) -> str:
    """A text that stays inside its cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def _yaml(recipe: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    return text.rstrip()


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    fence = "`" * max(3, *(len(run) + 1 for run in _BACKTICKS.findall(text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
