"""Keys and tokens never reach a card or a report: by the name that holds them, and by their shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_NAMES = (
    r"(?:api[_-]?key|access[_-]?key|private[_-]?key|token|secret|pass(?:word|wd|phrase)|credentials?|authorization)"
)
_SECRET_NAME = re.compile(rf"(?:^|[_-]){_NAMES}$", re.IGNORECASE)
_MARKER_NAME = re.compile(r"^(?:bos|eos|pad|unk|stop|mask|sep|cls|special)[_-]token$", re.IGNORECASE)
_VARIABLE = re.compile(r"^\$\{?\w+\}?$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|npm_|xox[abprs]-)[A-Za-z0-9_-]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[0-9A-Za-z_-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{12,}")
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@\"'<>]+@", re.IGNORECASE)
_SIGNED = re.compile(
    r"([?&;](?:sig|signature|key|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s\"'<>]+",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(rf"((?<![\w-])(?:--)?(?:\w+[_-])*{_NAMES}=)[\"']?[^\s\"'<>&;,]+", re.IGNORECASE)
_FLAG = re.compile(rf"(--(?:\w+-)*{_NAMES}\s+)[^\s\"'<>&;-][^\s\"'<>&;]*", re.IGNORECASE)


def redact_text(text: str) -> str:
    """Replace whatever looks like a credential in running text, a URL or a command line."""
    text = _SHAPES.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    for pattern in (_SIGNED, _ASSIGNED, _FLAG):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def redact_values(value: Any) -> Any:
    """The same mapping or list with every value under a secret's name replaced, at any depth.

    `max_tokens`, `eos_token` and the like aren't secrets; a reference to an environment variable (`${NAME}`) stays.
    """
    if isinstance(value, Mapping):
        return {key: _redact_entry(str(key), entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(entry) for entry in value]
    return redact_text(value) if isinstance(value, str) else value


def _redact_entry(name: str, value: Any) -> Any:
    plain = _CAPITAL.sub("_", name)
    if _SECRET_NAME.search(plain) is None or _MARKER_NAME.search(plain) is not None:
        return redact_values(value)
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _VARIABLE.match(value)):
        return value
    return REDACTED
