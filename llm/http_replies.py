"""What an HTTP reply of a chat-completions server means: a completion, or one of the typed errors.

Everything is decided by status, by structured code and by `finish_reason`; never by words in a message.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from headwater.core.errors import BadOutput, HeadwaterError, PermanentError, ThrottledError, TransientError
from headwater.core.text import clean_text
from headwater.llm.types import Completion, Usage


class UnreachableError(TransientError):
    """No reply came at all: says more about the server than about the request."""


class UnreadableError(TransientError):
    """A reply that is not what the protocol allows: garbage, half a body, an error of unknown kind inside a 200."""

    def __init__(self, what: str, *, raw: str = "") -> None:
        super().__init__(what)
        self.raw = raw


class RefusedError(PermanentError):
    """The server refused the request for good."""

    def __init__(self, what: str, *, todo: str, status: int, code: str, param: str) -> None:
        super().__init__(what, todo=todo)
        self.status = status
        self.code = code
        self.param = param
        """The field of the request that the server names, or an empty string."""


_THROTTLED = {429, 503, 529}
_PASSING = {408, 409, 425}
_UNREACHED = {502, 504}
_SHOWN_CHARS = 300

_CONTEXT_CODES = {"context_length_exceeded", "exceed_context_size_error"}
"""OpenAI's code and llama.cpp's type; vLLM names the parameter `input_tokens` instead."""
_CONTEXT_PARAM = "input_tokens"
_QUOTA_CODES = {"insufficient_quota", "billing_hard_limit_reached"}
"""Sent with status 429, yet no waiting helps."""

_STATUS_OF_CODE = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "overloaded": 503,
    "overloaded_error": 503,
    "server_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "internalservererror": 500,
    "api_error": 500,
    "timeout": 504,
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "invalid_api_key": 401,
    "authentication_error": 401,
    "permission_error": 403,
    "model_not_found": 404,
    "not_found_error": 404,
    "notfounderror": 404,
}
"""The HTTP status that a structured code stands for when the error comes inside a 200. Keys in lower case."""

_TODO = {
    401: "Check the API key.",
    403: "Check that this key may use this model.",
    404: "Check the model name and that base_url ends where /chat/completions begins.",
}


def read_reply(server: str, status: int, headers: Mapping[str, str], body: bytes) -> Completion:
    """The completion in a reply. `server` names the server in messages; header names are in lower case.

    Raises ThrottledError (429, 503, 529), TransientError (other 5xx, 408, 409, 425; UnreachableError for a gateway that
    found no server; UnreadableError for a reply that makes no sense), RefusedError, or BadOutput with the reason
    `cut_at_length`, `content_filter`, `empty_reply` or `context_length`.
    """
    reply = _parsed(body)
    if status != 200:
        raise _error(server, status, headers, _Details.of(reply, body))
    if not isinstance(reply, dict):
        raise UnreadableError(f"{server} answered 200 with {_shape(body)}.", raw=_shown(body))
    failure = _failure_inside(reply)
    if failure is not None:
        raise _error_inside_200(server, headers, _Details.of(failure, body), body)
    try:
        choice = reply["choices"][0]
        text, finish = choice["message"].get("content"), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UnreadableError(f"{server} answered 200 without a message.", raw=_shown(body)) from None
    if not isinstance(text, str | None):
        raise UnreadableError(f"{server} answered with content that is no text.", raw=_shown(body))
    return _completion(server, text or "", finish, reply.get("usage"))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the server asks us to wait, or None. RFC 9110 §10.2.3: seconds or an HTTP date; also `retry-after-ms`.

    A date is compared with the server's own `Date`, so that a wrong clock on either side does no harm.
    """
    milliseconds = _seconds(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("retry-after", "").strip()
    seconds = _seconds(given)
    if seconds is not None:
        return seconds
    at = _epoch(given)
    if at is None:
        return None
    now = _epoch(headers.get("date", ""))
    return max(0.0, at - (time.time() if now is None else now))


def _completion(server: str, text: str, finish: object, usage: object) -> Completion:
    cleaned, changed = clean_text(text)
    counted = usage if isinstance(usage, dict) else {}
    used = _usage(counted)
    if finish == "length":
        what = f"{server}: the reply was cut at max_tokens."
        raise BadOutput(what, reason="cut_at_length", raw=cleaned, todo="Raise max_tokens.", tokens=used.counts)
    if finish == "content_filter":
        what = f"{server}: the server's content filter stopped it."
        raise BadOutput(what, reason="content_filter", raw=cleaned, tokens=used.counts)
    if not cleaned.strip() or counted.get("completion_tokens") == 0:
        what = f"{server}: the reply has no tokens."
        raise BadOutput(what, reason="empty_reply", raw=cleaned, tokens=used.counts)
    return Completion(cleaned, used, changed)


def _usage(counted: Mapping[str, Any]) -> Usage:
    details = counted.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(counted.get("prompt_tokens")), _count(cached), _count(counted.get("completion_tokens")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


@dataclass(frozen=True, slots=True)
class _Details:
    """What a server says about an error, as far as it says it."""

    code: str = ""
    type: str = ""
    param: str = ""
    message: str = ""

    @classmethod
    def of(cls, reply: object, body: bytes) -> _Details:
        inner = reply.get("error", reply) if isinstance(reply, dict) else None
        if isinstance(inner, str):
            return cls(type=_word(reply.get("error_type")) if isinstance(reply, dict) else "", message=inner)
        if not isinstance(inner, dict):
            return cls(message=_shown(body))
        message = inner.get("message") or inner.get("detail") or ""
        return cls(_word(inner.get("code")), _word(inner.get("type")), _word(inner.get("param")), str(message))

    @property
    def is_about_context(self) -> bool:
        return bool(_CONTEXT_CODES & {self.code, self.type}) or self.param == _CONTEXT_PARAM

    @property
    def is_about_quota(self) -> bool:
        return bool(_QUOTA_CODES & {self.code, self.type})

    def __str__(self) -> str:
        named = [word for word in (self.code, self.type, self.param and f"param {self.param}") if word]
        return ", ".join(dict.fromkeys(named))


def _failure_inside(reply: dict[str, Any]) -> object:
    """The error object a 200 may carry: at the top, as vLLM used to write it, or inside the choice as routers do."""
    if reply.get("error"):
        return reply
    if reply.get("object") == "error":
        return reply
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(choice, dict) and (choice.get("error") or choice.get("finish_reason") == "error"):
        return choice
    return None


def _error_inside_200(server: str, headers: Mapping[str, str], details: _Details, body: bytes) -> HeadwaterError:
    for word in (details.code, details.type):
        status = int(word) if word.isascii() and word.isdigit() else _STATUS_OF_CODE.get(word.lower(), 0)
        if 400 <= status < 600:
            return _error(server, status, headers, details, inside=_shown(body))
    if details.is_about_context or details.is_about_quota:
        return _error(server, 400, headers, details)
    what = f"{server} answered 200 with an error inside ({str(details) or 'no code'}): {details.message[:_SHOWN_CHARS]}"
    return UnreadableError(what, raw=_shown(body))


def _error(
    server: str, status: int, headers: Mapping[str, str], details: _Details, *, inside: str | None = None
) -> HeadwaterError:
    """The error for `status`; `inside` is the whole reply when the error came inside a 200."""
    named = ", ".join(filter(None, (f"{status} inside a 200" if inside else str(status), str(details))))
    what = f"{server} answered {named}: {details.message[:_SHOWN_CHARS]}".rstrip(": ")
    if details.is_about_context:
        return BadOutput(what, reason="context_length", todo="Shorten the prompt or lower max_tokens.")
    if status in _THROTTLED and not details.is_about_quota:
        return ThrottledError(what, retry_after=retry_after(headers))
    if status >= 500 and inside:
        return UnreadableError(what, raw=inside)
    if status >= 500 or status in _PASSING:
        return UnreachableError(what) if status in _UNREACHED else TransientError(what)
    todo = "Top up the account." if details.is_about_quota else _todo(status, headers)
    return RefusedError(what, todo=todo, status=status, code=details.code, param=details.param)


def _todo(status: int, headers: Mapping[str, str]) -> str:
    if 300 <= status < 400:
        return f"It redirects to {headers.get('location', 'elsewhere')}: write that as base_url."
    return _TODO.get(status, "Change the request: the server will not take it as it is.")


def _parsed(body: bytes) -> Any:
    """The JSON in `body`, or None. The lenient parser is for lone surrogates, which the fast one refuses."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _shape(body: bytes) -> str:
    return f"{len(body)} bytes that are no JSON object" if body else "an empty body"


def _shown(body: bytes) -> str:
    return clean_text(body[:4096].decode("utf-8", "replace"))[0]


def _word(value: object) -> str:
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _epoch(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
