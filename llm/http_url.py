"""Where a server's paths are, from what a person wrote as `base_url`."""

from __future__ import annotations

from yarl import URL

from headwater.core.errors import ConfigError
from headwater.core.redact import is_secret_name, redact_text

KEY_ELSEWHERE = (
    "What a recipe holds is recorded: export the key as an environment variable and name that as api_key_env; it is "
    "sent as a bearer token."
)


def server_base(text: str) -> URL:
    """The URL up to where `/chat/completions` begins, with the query that every request carries.

    Raises ConfigError for what is no http(s) URL, and for one that holds a credential.
    """
    try:
        url = URL(text)
        usable = url.scheme in {"http", "https"} and bool(url.host) and url.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("base_url is no http(s) URL.", todo="Write something like http://localhost:8000/v1.")
    if url.user is not None or url.password is not None:
        raise ConfigError("base_url holds a user or a password.", todo=KEY_ELSEWHERE)
    for name, value in url.query.items():
        if is_secret_name(name) or redact_text(f"?{name}={value}") != f"?{name}={value}":
            what = f"base_url holds what looks like a secret, in {redact_text(name)!r} of its query."
            raise ConfigError(what, todo=KEY_ELSEWHERE)
    path = url.path.rstrip("/").removesuffix("/chat/completions")
    return url.with_path(path or "/v1").with_query(url.query)


def endpoint(base: URL, *path: str) -> URL:
    """The URL of a path below `base`, with the base's query."""
    return base.joinpath(*path).with_query(base.query)
