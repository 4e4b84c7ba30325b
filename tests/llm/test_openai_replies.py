"""What an HTTP reply means: decided by status, structured code and finish_reason, never by words."""

from __future__ import annotations

import json
import time
from email.utils import formatdate

import pytest

from headwater.core.errors import BadOutput, HeadwaterError, PermanentError, ThrottledError, TransientError
from headwater.llm.http_replies import RefusedError, UnreachableError, UnreadableError, read_reply, retry_after
from headwater.llm.types import Completion, Usage

WORDS_THAT_MISLEAD = "rate limit 429 context_length_exceeded timeout invalid api key"


def reply(content: object = "hello", finish: str = "stop", **more: object) -> dict[str, object]:
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}], **more}


def lower(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def read(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Completion:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_reply("server:1", status, lower(headers or {}), raw)


def error_of(body: object, status: int = 200, headers: dict[str, str] | None = None) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        read(body, status, headers)
    return caught.value


def test_text_and_usage_with_cached_tokens_are_read() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(reply(usage=usage)) == Completion("hello", Usage(11, 8, 3), cleaned=False)


@pytest.mark.parametrize(
    "usage", [None, [], "many", {}, {"prompt_tokens": None, "completion_tokens": "3", "prompt_tokens_details": None}]
)
def test_missing_or_strange_usage_counts_as_zero(usage: object) -> None:
    assert read(reply(usage=usage)).usage == Usage()


def test_a_lone_surrogate_and_a_nul_are_cleaned_and_flagged_and_a_pair_is_joined() -> None:
    body = rb'{"choices":[{"message":{"content":"a\ud83db \ud83d\ude00 c\u0000d"},"finish_reason":"stop"}]}'
    assert read(body) == Completion("a\ufffdb \N{GRINNING FACE} cd", Usage(), cleaned=True)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (reply("half a sent", "length"), "cut_at_length"),
        (reply(None, "length"), "cut_at_length"),
        (reply("hm", "content_filter"), "content_filter"),
        (reply(""), "empty_reply"),
        (reply(" \n\t"), "empty_reply"),
        (reply(None), "empty_reply"),
        (reply("\x00"), "empty_reply"),
        (reply("slow down please", usage={"prompt_tokens": 0, "completion_tokens": 0}), "empty_reply"),
    ],
)
def test_a_reply_that_is_no_data_is_bad_output_with_its_reason(body: object, reason: str) -> None:
    error = error_of(body)
    assert isinstance(error, BadOutput)
    assert error.reason == reason


def test_the_text_of_a_cut_reply_is_kept_and_its_tokens_are_counted() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    error = error_of(reply("half a sent", "length", usage=usage))
    assert isinstance(error, BadOutput)
    assert error.raw == "half a sent"
    assert error.tokens == (11, 8, 3)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe", b'{"choices": [{"mess', b"[]", b"null", b'"hi"', b"{}", b'{"choices": []}',
     b'{"choices": null}', b'{"choices": [{"message": null}]}', b'{"choices": [{"message": {"content": ["x"]}}]}',
     b"[" * 200_000],
)  # fmt: skip
def test_a_reply_that_makes_no_sense_may_pass_and_is_kept(body: bytes) -> None:
    error = error_of(body)
    assert isinstance(error, UnreadableError)
    assert isinstance(error, TransientError)
    assert error.raw == body[:4096].decode("utf-8", "replace")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422])
def test_a_refusal_is_permanent_and_names_status_code_and_what_to_do(status: int) -> None:
    body = {"error": {"message": "no", "type": "some_type", "code": "some_code", "param": "top_p"}}
    error = error_of(body, status)
    assert isinstance(error, RefusedError)
    assert isinstance(error, PermanentError)
    assert f"server:1 answered {status}, some_code, some_type, param top_p: no" in str(error)
    assert error.todo


@pytest.mark.parametrize("status", [408, 409, 425, 500, 501, 502, 504, 507])
def test_a_server_fault_may_pass(status: int) -> None:
    error = error_of(b"Internal Server Error", status)
    assert isinstance(error, TransientError)
    assert not isinstance(error, ThrottledError | UnreadableError)


@pytest.mark.parametrize("status", [502, 504])
def test_a_gateway_that_finds_no_server_means_that_nobody_was_reached(status: int) -> None:
    assert isinstance(error_of(b"", status), UnreachableError)


@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_busy_server_asks_for_patience(status: int) -> None:
    error = error_of({"error": {"message": "busy"}}, status, {"Retry-After": "7"})
    assert isinstance(error, ThrottledError)
    assert error.retry_after == 7


def test_no_quota_left_is_permanent_although_the_status_is_429() -> None:
    assert isinstance(error_of({"error": {"code": "insufficient_quota"}}, 429), RefusedError)


@pytest.mark.parametrize(
    "inner",
    [
        {"code": "context_length_exceeded", "type": "invalid_request_error"},
        {"code": 400, "type": "exceed_context_size_error"},
        {"code": 400, "type": "BadRequestError", "param": "input_tokens"},
    ],
    ids=["OpenAI", "llama.cpp", "vLLM"],
)
@pytest.mark.parametrize("status", [400, 200])
def test_a_prompt_too_long_is_known_by_its_structured_code(inner: dict[str, object], status: int) -> None:
    error = error_of({"error": inner}, status)
    assert isinstance(error, BadOutput)
    assert error.reason == "context_length"


def test_words_in_a_message_decide_nothing() -> None:
    refused = error_of({"error": {"message": WORDS_THAT_MISLEAD}}, 400)
    assert isinstance(refused, RefusedError)
    failed = error_of({"error": {"message": WORDS_THAT_MISLEAD}}, 500)
    assert type(failed) is TransientError
    assert read(reply(WORDS_THAT_MISLEAD)).text == WORDS_THAT_MISLEAD


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        ({"code": 429}, ThrottledError),
        ({"code": "429"}, ThrottledError),
        ({"code": "rate_limit_exceeded"}, ThrottledError),
        ({"type": "overloaded_error"}, ThrottledError),
        ({"code": 500}, UnreadableError),
        ({"code": None, "type": "server_error"}, UnreadableError),
        ({"type": "InternalServerError", "code": "x"}, UnreadableError),
        ({"code": 401}, RefusedError),
        ({"code": "model_not_found"}, RefusedError),
        ({"type": "BadRequestError"}, RefusedError),
        ({"code": "insufficient_quota"}, RefusedError),
        ({"code": "never_heard_of"}, UnreadableError),
        ({"message": WORDS_THAT_MISLEAD}, UnreadableError),
        ("just words", UnreadableError),
    ],
)
def test_an_error_inside_a_200_counts_by_its_structured_code(inner: object, kind: type[HeadwaterError]) -> None:
    assert type(error_of({"error": inner})) is kind
    assert type(error_of({**reply(), "error": inner})) is kind


def test_an_error_inside_a_200_is_found_at_the_top_level_and_in_the_choice() -> None:
    old_vllm = {"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}
    assert isinstance(error_of(old_vllm), UnreadableError)
    router = {"choices": [{"message": {"content": "so far"}, "error": {"code": 502}, "finish_reason": "error"}]}
    assert isinstance(error_of(router), UnreadableError)


def test_a_null_error_beside_a_good_reply_is_none() -> None:
    assert read(reply(error=None)).text == "hello"


def test_a_redirect_is_refused_and_names_its_target() -> None:
    assert "https://there/v1" in error_of(b"", 307, {"Location": "https://there/v1"}).todo


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": "0.25"}, 0.25),
        ({"Retry-After": "-4"}, 0.0),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "soon"}, None),
        ({}, None),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT", "Date": "Wed, 21 Oct 2015 07:29:00 GMT"}, 0.0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(lower(headers)) == seconds


def test_a_retry_after_date_without_a_server_clock_is_compared_with_ours() -> None:
    given = retry_after({"retry-after": formatdate(time.time() + 60, usegmt=True)})
    assert given is not None
    assert 57 < given <= 60
