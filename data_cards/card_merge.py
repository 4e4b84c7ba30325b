"""Updating a card that people may have edited: Headwater owns a marked section and what it wrote in the YAML block.

The opening marker records a hash of every metadata value written last. A value that no longer has that hash was
changed by a person and is kept; one that still has it is ours to renew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from headwater.core.errors import ConfigError

BEGIN = "<!-- headwater:begin"
END = "<!-- headwater:end -->"

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(re.escape(BEGIN) + r"(.*?)-->", re.DOTALL)
_FACTS = ("configs", "dataset_info", "size_categories")
"""Keys that describe the files beside the card: always ours, but for the configurations of others."""


def merge_card(existing: str | None, new: str) -> str:
    """The existing card with Headwater's section and metadata brought up to date from `new`.

    Text outside the markers, keys we never wrote and values a person changed stay as they are; tags are united, and
    configurations other than ours are kept. Merging twice changes nothing more. Raises ConfigError when the existing
    card's YAML block or its markers are damaged.
    """
    if existing is None or not existing.strip():
        return new
    old_data, old_body = _split(existing)
    new_data, new_body = _split(new)
    block = _block(new_body)
    if block is None:
        raise ConfigError(f"The new card has no {BEGIN} … section.", todo="Render it with render_card.")
    written = _written(old_body)
    head = dump_front_matter(_merge_metadata(old_data, new_data, written))
    section = new_body[slice(*block)]
    place = _block(old_body)
    if place is None:
        return f"{head}\n{old_body.strip()}\n\n{section}\n" if old_body.strip() else f"{head}\n{section}\n"
    return head + old_body[: place[0]] + section + old_body[place[1] :]


def mark(body: str, metadata: Mapping[str, Any]) -> str:
    """The body between Headwater's markers; the opening one records what metadata was written."""
    record = json.dumps({key: _hash(value) for key, value in metadata.items()}, sort_keys=True)
    body = body.replace("<!-- headwater:", "<!- headwater:")
    return f"{BEGIN} {record} -->\n{body}\n{END}\n"


def dump_front_matter(metadata: Mapping[str, Any]) -> str:
    """The YAML block between its `---` lines, keys in the order given."""
    import yaml

    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=100)}---\n"


def _split(card: str) -> tuple[dict[str, Any], str]:
    import yaml

    found = _FRONT_MATTER.match(card)
    if found is None:
        return {}, card
    try:
        data = yaml.safe_load(found[1]) or {}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The YAML block of the existing card can't be read: {error}.",
            todo="Repair the lines between the two --- of its README.md, or move the file away.",
        ) from error
    if not isinstance(data, dict):
        raise ConfigError("The YAML block of the existing card isn't a mapping.", todo="Write `key: value` lines.")
    return data, card[found.end() :]


def _block(body: str) -> tuple[int, int] | None:
    """Where the marked section begins and ends, or None when there is none."""
    begins, ends = body.count(BEGIN), body.count(END)
    if begins == 0 and ends == 0:
        return None
    begin, end = body.find(BEGIN), body.find(END)
    if (begins, ends) != (1, 1) or end < begin:
        raise ConfigError(
            f"The existing card has {begins} opening and {ends} closing headwater markers; one pair is needed.",
            todo=f"Restore `{BEGIN} -->` before and `{END}` after Headwater's section, or remove both.",
        )
    return begin, end + len(END)


def _written(body: str) -> dict[str, str]:
    found = _OPENING.search(body)
    try:
        record = json.loads(found[1]) if found else {}
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _merge_metadata(old: Mapping[str, Any], new: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        if key == "tags":
            merged[key] = list(dict.fromkeys([*_as_list(old.get(key)), *value]))
        elif key in _FACTS or key not in old or written.get(key) == _hash(old[key]):
            merged[key] = value
    for key in ("configs", "dataset_info"):
        merged[key] = _with_others(old.get(key), new[key])
    return merged


def _with_others(old: Any, new: Any) -> Any:
    """Our entries, then those of configurations that we don't write; a single one stays what it was."""
    ours = _as_list(new)
    names = {entry["config_name"] for entry in ours}
    others = [entry for entry in _as_list(old) if entry.get("config_name", "default") not in names]
    return [*ours, *others] if others else new


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
