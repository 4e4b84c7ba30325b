"""Keys and tokens never reach what is written down: known by the name that holds them, and by their shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_NAMES = (
    r"(?:(?:api|access|private|secret|subscription)[_-]?key"
    r"|token|secret|pass(?:word|wd|phrase)|credentials?|authorization)"
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
    r"([?&;](?:sig|signature|key|code|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s\"'<>]+",
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


def find_secret(value: Any, path: str = "") -> str:
    """The dotted path of the first entry, at any depth, that looks like a credential; empty when there is none.

    For what is sent as it stands: a `${NAME}` under a secret's name, which nothing fills in, counts too.
    """
    if isinstance(value, Mapping):
        entries = [(f"{path}.{key}", str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        entries = [(f"{path}[{i}]", "", entry) for i, entry in enumerate(value)]
    else:
        return path if isinstance(value, str) and redact_text(value) != value else ""
    for place, name, entry in entries:
        found = place if is_secret_name(name) and not _says_nothing(entry) else find_secret(entry, place)
        if found:
            return found.removeprefix(".")
    return ""


def is_secret_name(name: str) -> bool:
    """Whether what stands under `name` is a credential, going by the name alone."""
    plain = _CAPITAL.sub("_", name)
    return _SECRET_NAME.search(plain) is not None and _MARKER_NAME.search(plain) is None


def _redact_entry(name: str, value: Any) -> Any:
    if not is_secret_name(name):
        return redact_values(value)
    return value if _says_nothing(value) or (isinstance(value, str) and _VARIABLE.match(value)) else REDACTED


def _says_nothing(value: Any) -> bool:
    return value is None or isinstance(value, bool)
