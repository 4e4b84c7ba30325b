"""What a server says about its model at `GET /v1/models`, as far as it makes two servers interchangeable."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson
from yarl import URL

from headwater.llm.http_url import endpoint

_DEADLINE_S = 5.0
_MAX_BYTES = 1 << 22
_REVISION_FIELDS = ("revision", "model_sha", "sha", "digest")
_SNAPSHOT = re.compile(r"models--(?P<org>[^/\\]+?)--(?P<name>[^/\\]+)[/\\]snapshots[/\\](?P<commit>[0-9a-f]{40})")
"""A folder of the Hugging Face cache: the repository and the commit stand in its path."""

_log = logging.getLogger(__name__)


def portable_name(model: str) -> str:
    """A name that means the same on another machine: a cache folder's repository, any other folder's last part."""
    snapshot = _SNAPSHOT.search(model)
    if snapshot:
        return f"{snapshot['org']}/{snapshot['name']}"
    for path in (PurePosixPath(model), PureWindowsPath(model)):
        if path.is_absolute():
            return path.name
    return model


def reported_revision(base: URL, model: str, headers: Mapping[str, str]) -> str:
    """The revision the server reports for `model`, or an empty string when it does not tell.

    Names, owners and start times are no revision. vLLM tells where it loaded the model from; when that is a snapshot
    of the Hugging Face cache, its path holds the commit. A server that cannot be asked counts as one that does not
    tell: finished stages stay reusable while it is switched off.
    """
    card = _card(_listing(base, headers), model)
    for name in _REVISION_FIELDS:
        if isinstance(card.get(name), str) and card[name]:
            return str(card[name])
    for path in (str(card.get("root") or ""), model):
        snapshot = _SNAPSHOT.search(path)
        if snapshot:
            return snapshot["commit"]
    return ""


def _listing(base: URL, headers: Mapping[str, str]) -> Any:
    server = f"{base.host}:{base.port}"
    request = Request(str(endpoint(base, "models")))
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a key goes to the server it was given for, nowhere else
    try:
        with urlopen(request, timeout=_DEADLINE_S) as reply:
            return orjson.loads(reply.read(_MAX_BYTES))
    except HTTPError as error:
        _log.info("%s does not list its models (status %d).", server, error.code)
    except (OSError, ValueError, HTTPException) as error:
        _log.warning("%s could not be asked which model it serves (%s).", server, type(error).__name__)
    return None


def _card(listing: Any, model: str) -> dict[str, Any]:
    cards = listing.get("data") if isinstance(listing, dict) else None
    for card in cards if isinstance(cards, list) else []:
        if isinstance(card, dict) and card.get("id") == model:
            return card
    return {}
