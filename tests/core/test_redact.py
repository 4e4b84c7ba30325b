"""Credentials are replaced by name and by shape, and ordinary words are left alone."""

from __future__ import annotations

import pytest

from headwater.core.redact import find_secret, redact_text, redact_values


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuv",
        "sk-proj-abcdefghijklmnop1234",
        "ghp_abcdefghijklmnopqrstuv0123",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_credential_is_known_by_its_shape(secret: str) -> None:
    assert redact_text(f"before {secret} after") == "before [redacted] after"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/v1", "https://[redacted]@host/v1"),
        ("s3://b/k?X-Amz-Signature=abc&x=1", "s3://b/k?X-Amz-Signature=[redacted]&x=1"),
        ("https://f.azurewebsites.net/rows.jsonl?code=abc", "https://f.azurewebsites.net/rows.jsonl?code=[redacted]"),
        ("https://host/v1?subscription-key=abc", "https://host/v1?subscription-key=[redacted]"),
        ("OPENAI_API_KEY=abc pipeline run", "OPENAI_API_KEY=[redacted] pipeline run"),
        ("run --api-key abc --seed 1", "run --api-key [redacted] --seed 1"),
        ("run --set engine.api_key=abc", "run --set engine.api_key=[redacted]"),
        ("Authorization: Bearer abcdefghijkl", "Authorization: Bearer [redacted]"),
    ],
)
def test_a_credential_is_known_by_its_place(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=64 and eos_token_id=2",
        "the secret of good bread: patience",
        "see https://example.org/a@b and mail ann@hill.org",
        "run --tokens 5 --set sampling.max_tokens=9",
        "a basic idea, a sk-learn probe",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_values_under_a_secret_name_are_replaced_at_any_depth() -> None:
    recipe = {"a": [{"apiKey": "x", "auth": {"password": 1234, "user": "me"}}], "hf_token": "y", "n": 3}
    assert redact_values(recipe) == {
        "a": [{"apiKey": "[redacted]", "auth": {"password": "[redacted]", "user": "me"}}],
        "hf_token": "[redacted]",
        "n": 3,
    }


def test_names_that_only_sound_secret_keep_their_values() -> None:
    recipe = {
        "max_tokens": 64,
        "eos_token": "</s>",
        "tokenizer": "t",
        "api_key_env": "OPENAI_API_KEY",
        "api_key": "${OPENAI_API_KEY}",
        "token": None,
    }
    assert redact_values(recipe) == recipe


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [{"b": 1}, {"apiKey": "x"}]}, "a[1].apiKey"),
        ({"headers": {"Authorization": "Basic eA=="}}, "headers.Authorization"),
        ({"auth": {"secret_key": 1234}}, "auth.secret_key"),
        ({"token": {"value": "x"}}, "token"),
        ({"api_key": "${OPENAI_API_KEY}"}, "api_key"),
        ({"user": "sk-abcdefghijklmnop1234"}, "user"),
        ({"top_k": 20, "stop_token": "</s>", "max_tokens": 5, "password": None, "token": False}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}, "stop_token_ids": [2]}, ""),
    ],
)
def test_the_place_of_a_secret_is_named_and_not_the_secret(value: dict[str, object], path: str) -> None:
    assert find_secret(value) == path
