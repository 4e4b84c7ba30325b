"""Any server that speaks OpenAI's `/v1/chat/completions`: vLLM, SGLang, llama.cpp, Ollama, TGI, the hosted ones.

The client was chosen by measurement, in seconds of processor time per 2,000 calls (64 in flight, 50 ms, two cores):
aiohttp with its defaults 0.42, tuned 0.36, httptools on a bare asyncio protocol 0.15. A plain-HTTP server, which is a
local one, is worth the lean client (`http_lean.py`); TLS and proxies go through aiohttp (`http_aiohttp.py`), where
seconds of latency hide the difference. `tests/bench/bench_http.py` measures the engine against a bare aiohttp client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

import orjson
from pydantic import SecretStr
from yarl import URL

from headwater.core.errors import BadOutput, ConfigError, HeadwaterError, TransientError
from headwater.core.text import clean_text
from headwater.llm.http_gate import Gate
from headwater.llm.http_lean import LeanTransport
from headwater.llm.http_models import portable_name, reported_revision
from headwater.llm.http_replies import RefusedError, UnreadableError, read_reply
from headwater.llm.http_tries import Tries
from headwater.llm.http_url import endpoint, server_base
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, EngineIdentity

if TYPE_CHECKING:
    from headwater.llm.http_aiohttp import AiohttpTransport

_OWN_FIELDS = frozenset({"model", "messages", "seed", "stream", "stop", "n"})


class OpenAIEngine:
    """Chats with one model behind one server. Usable from any number of coroutines of one event loop at a time.

    base_url            up to where `/chat/completions` begins, e.g. http://localhost:8000/v1; its query
                        (`?api-version=…`) goes along with every request
    model               the name the server knows the model by
    api_key             sent as a bearer token; never shown anywhere
    max_concurrency     calls in flight at most; adapts downwards when the server asks for it
    deadline_s          seconds for one call from its first to its last byte; waiting for a turn does not count
    attempts            how often one request is tried when the fault may be its own; a server that is down or asks for
                        patience uses up none
    patience_s          seconds of trouble without a single answer after which the waiting requests end in a
                        TransientError; never less than deadline_s
    extra_body          more fields for every request body, e.g. {"top_k": 20}; null leaves out one of ours that the
                        server will not take (`temperature`, `top_p`, `max_tokens`)
    """

    batched = False

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str | None = None,
        max_concurrency: int = 64,
        deadline_s: float = 120,
        attempts: int = 6,
        patience_s: float = 300,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        _check_positive(
            max_concurrency=max_concurrency, deadline_s=deadline_s, attempts=attempts, patience_s=patience_s
        )
        self._base = server_base(base_url)
        self._model = model
        self._key = SecretStr(_header_safe(api_key)) if api_key else None
        self._most = max_concurrency
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._patience_s = max(patience_s, deadline_s)
        self._extra = _extra(extra_body or {})
        self._limit_field = "max_tokens"
        self._server = f"{self._base.host}:{self._base.port}"
        self._url = endpoint(self._base, "chat", "completions")
        self._line: _Line | None = None
        self._identity: EngineIdentity | None = None

    def __repr__(self) -> str:
        return f"OpenAIEngine(model={self._model!r}, server={self._server!r})"

    @property
    def identity(self) -> EngineIdentity:
        """Asks the server once, blocking for a few seconds at most. Where the server stands is no part of it."""
        if self._identity is None:
            revision = reported_revision(self._base, self._model, self._headers())
            extra = f"extra_body:{sha256(self._extra).hexdigest()[:16]}" if self._extra != b"{}" else ""
            self._identity = EngineIdentity(
                engine="openai",
                model=portable_name(self._model),
                revision=" ".join(filter(None, (revision, extra))),
                tokenizer="",
                chat_template="",
            )
        return self._identity

    @property
    def concurrency(self) -> int:
        """How many calls may be in flight now."""
        return self._line.gate.limit if self._line else self._most

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        """Stream one outcome per request as it ends. Reads `requests` no faster than the calls go out."""
        ahead = iter(requests)
        first = list(islice(ahead, 2))
        if len(first) < 2:
            for request in first:
                yield await self._outcome(request)
            return
        done: asyncio.Queue[asyncio.Task[ChatOutcome]] = asyncio.Queue()
        running: set[asyncio.Task[ChatOutcome]] = set()

        def start(some: Iterable[ChatRequest]) -> None:
            for request in some:
                task = asyncio.create_task(self._outcome(request))
                running.add(task)
                task.add_done_callback(done.put_nowait)

        ahead = chain(first, ahead)
        try:
            start(islice(ahead, self._most))
            while running:
                task = await done.get()
                running.discard(task)
                start(islice(ahead, 1))
                yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def complete(self, request: ChatRequest) -> Completion:
        """The completion of one request.

        Raises TransientError or ThrottledError when the server stays away or busy, BadOutput when what came is no data,
        PermanentError when the server refuses the request.
        """
        line = self._open_line()
        tries = Tries(request, self._attempts, self._patience_s)
        while True:
            permit = await line.gate.enter()
            limit_field = self._limit_field
            try:
                completion = await self._call(line, request)
            except TransientError as error:
                line.gate.refused(permit, error)
                pause_s = tries.pause_after(error, line.gate)
            except RefusedError as error:
                line.gate.answered(permit)
                if not self._learns_from(error, limit_field):
                    raise _explained(error, request) from None
                pause_s = 0.0
            except HeadwaterError:
                line.gate.answered(permit)
                raise
            else:
                line.gate.answered(permit)
                return completion
            finally:
                line.gate.leave(permit)
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Close all connections. The next call opens new ones."""
        line, self._line = self._line, None
        if line is not None and line.loop is asyncio.get_running_loop():
            await line.transport.aclose()

    async def _outcome(self, request: ChatRequest) -> ChatOutcome:
        try:
            return ChatOutcome(request.id, await self.complete(request))
        except HeadwaterError as error:
            return ChatOutcome(request.id, error)

    async def _call(self, line: _Line, request: ChatRequest) -> Completion:
        try:
            reply = await line.transport.post(self._body(request))
            return read_reply(self._server, reply.status, reply.headers, reply.body)
        except HeadwaterError as error:
            raise self._hide_key(error) from None

    def _body(self, request: ChatRequest) -> bytes:
        sampling = request.sampling
        body: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": m.role, "content": clean_text(m.content)[0]} for m in request.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._limit_field: sampling.max_tokens,
            "seed": request.seed,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if _is_prefilled(request):
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self._extra != b"{}":
            body |= orjson.loads(self._extra)
            body = {name: value for name, value in body.items() if value is not None}
        return orjson.dumps(body)

    def _learns_from(self, error: RefusedError, sent_as: str) -> bool:
        """OpenAI's newer models take the length limit under another name, and say so by code and parameter."""
        if (error.code, error.param, sent_as) != ("unsupported_parameter", "max_tokens", "max_tokens"):
            return False
        self._limit_field = "max_completion_tokens"
        return True

    def _open_line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.loop is not loop:
            self._line = _Line(
                loop=loop,
                transport=_transport(self._url, self._headers(), self._deadline_s),
                gate=Gate(self._server, most=self._most, patience_s=self._patience_s),
            )
        return self._line

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.get_secret_value()}"
        return headers

    def _hide_key(self, error: HeadwaterError) -> HeadwaterError:
        """Servers echo keys in their messages; ours must not travel on."""
        if self._key is not None:
            key = self._key.get_secret_value()
            error.what = error.what.replace(key, "***")
            error.todo = error.todo.replace(key, "***")
            error.args = (f"{error.what} {error.todo}".strip(),)
            if isinstance(error, BadOutput | UnreadableError):
                error.raw = error.raw.replace(key, "***")
        return error


@dataclass(frozen=True, slots=True)
class _Line:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    transport: LeanTransport | AiohttpTransport
    gate: Gate


def _is_prefilled(request: ChatRequest) -> bool:
    return bool(request.messages) and request.messages[-1].role == "assistant"


def _explained(error: RefusedError, request: ChatRequest) -> RefusedError:
    if error.status not in {400, 422} or not _is_prefilled(request):
        return error
    todo = (
        "The request ends with a message for the model to continue (`continue_final_message`): vLLM and SGLang can do "
        "that, some servers cannot. Use one that can, or a recipe without a prefill."
    )
    return RefusedError(error.what, todo=todo, status=error.status, code=error.code, param=error.param)


def _header_safe(key: str) -> str:
    stripped = key.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise ConfigError(
            "api_key holds characters no HTTP header can carry.", todo="Check for a line break inside it."
        )
    return stripped


def _extra(fields: Mapping[str, object]) -> bytes:
    taken = sorted(_OWN_FIELDS & set(fields))
    if taken:
        raise ConfigError(f"extra_body may not set {', '.join(taken)}.", todo="Leave it out: the engine sends it.")
    try:
        return orjson.dumps(dict(fields), option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra_body is not plain JSON: {error}.", todo="Use numbers, texts, lists and maps."
        ) from None


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}.", todo="It must be greater than zero.")


def _transport(url: URL, headers: Mapping[str, str], deadline_s: float) -> LeanTransport | AiohttpTransport:
    """The leanest client that can do it. The environment's proxy is looked up once, not per call."""
    proxy = None if proxy_bypass(url.host or "") else getproxies().get(url.scheme)
    if url.scheme == "http" and proxy is None:
        return LeanTransport(url, headers, deadline_s=deadline_s)
    from headwater.llm.http_aiohttp import AiohttpTransport

    return AiohttpTransport(url, headers, deadline_s=deadline_s, proxy=proxy)
