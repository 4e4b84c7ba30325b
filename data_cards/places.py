"""A published card tells nothing of its author's disk or network: of a local path it shows the last part alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATH_KEYS = ("source", "model")
"""Keys of a recipe that may hold a path, a relative one too."""
_SERVER_KEY = "base_url"
_LOCAL_URL = re.compile(r"^(?:file|local):(?=/)", re.IGNORECASE)
_ROOTED = re.compile(r"^(?:[/~]|\.\.?[/\\]|[A-Za-z]:[\\/]|\\\\)")
_FOLDERS = re.compile(r"^(?:/|~\w*/|\.\.?[/\\]|[A-Za-z]:[\\/]|\\\\)\S*[^/\\\s][/\\]\S+$")
"""At least one folder and something in it: `/no_think` is a word to a model, and no path."""
_FOLDERS_WITH_SPACES = re.compile(r"^(?:/|~\w*/|[A-Za-z]:[\\/])[^\n]*[/\\][^/\\\n]*\.\w{1,11}$")
_DATA_FILE = re.compile(
    r"\.(?:jsonl?|ndjson|csv|tsv|txt|parquet|arrow|safetensors|pth?|npz)(?:\.(?:gz|zst|bz2|xz))?$", re.IGNORECASE
)


def without_places(recipe: Any) -> Any:
    """The recipe as it may be published: local paths by their last part, and without the addresses of servers.

    Hub ids, URLs and files of the package stay. Where a recipe names a source or a model, a relative path is found
    too; elsewhere only what can be nothing but a path.
    """
    if isinstance(recipe, Mapping):
        return {
            public_name(key) if isinstance(key, str) else key: _entry(key, value)
            for key, value in recipe.items()
            if key != _SERVER_KEY or not value
        }
    if isinstance(recipe, list | tuple):
        return [without_places(value) for value in recipe]
    return public_name(recipe) if isinstance(recipe, str) else recipe


def public_name(text: str, *, is_source: bool = False) -> str:
    """`text`, or its last part when it is a local path; `is_source` says that it names a source or a model.

    Of chained URLs (`zip://a.csv::file:///home/…`) every link is looked at.
    """
    if "\n" in text or text.startswith("package:"):
        return text
    if "::" in text and "://" in text:
        return "::".join(public_name(link, is_source=is_source) for link in text.split("::"))
    if _LOCAL_URL.match(text):
        return _last_part(_LOCAL_URL.sub("", text))
    if "://" in text:
        return text
    is_path = _FOLDERS.match(text) or _FOLDERS_WITH_SPACES.match(text) or (is_source and _is_local(text))
    return _last_part(text) if is_path else text


def _entry(key: Any, value: Any) -> Any:
    return public_name(value, is_source=True) if key in _PATH_KEYS and isinstance(value, str) else without_places(value)


def _is_local(text: str) -> bool:
    """A relative path may look like a Hub id; what is there is read from there, and so counts as a path."""
    if _ROOTED.match(text):
        return True
    return ("/" in text or "\\" in text) and (_DATA_FILE.search(text) is not None or Path(text).exists())


def _last_part(path: str) -> str:
    """Of a model's folder in the Hub's cache its id, which means the same on every machine."""
    from headwater.llm.http_models import portable_name

    path = path.rstrip("/\\") or path
    name = portable_name(path)
    return name if name != path else re.split(r"[/\\]", path)[-1] or path
