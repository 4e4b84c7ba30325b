"""An OpenAI-compatible HTTP server that misbehaves on request. Real sockets, real HTTP, no model.

In a test:

    async with FaultServer() as server:
        server.script("throttle", "garbage")      # the next two calls, in order of arrival; then all is well
        engine = OpenAIEngine(base_url=server.base_url, model="fake")
        ...
        assert server.asked[key_of(body)] == 3    # calls that arrived, per distinct request
        assert server.served[key_of(body)] == 1   # calls that got a good reply

As a process of its own, for kill tests and speed:

    python fault_server.py --port 0 --latency-ms 50 --share throttle=0.05 --share http_500=0.02

It prints one line, `listening on http://127.0.0.1:PORT/v1`, then serves until it is killed. `GET /counts` returns
{"asked": {key: n}, "served": {key: n}, "faults": {fault: n}, "peak": n}; `POST /plan` with the fields of `Plan` changes
the plan; `POST /script` with a list of faults names what happens to the next calls.

A good reply is a pure function of the messages, the seed and the sampling, so that two runs can be compared byte by
byte. What happens to a call depends only on the request, on how often it was asked before, and on the plan: never on
the order of arrival, unless a script says so.

The faults, by name:

    throttle          429 with Retry-After            close             the connection closed without a word
    overloaded        503 without Retry-After         hang              no answer for an hour
    http_500          500, no JSON                    cut               finish_reason "length" (sticks to a request)
    bad_request       400 with a structured code      content_filter    finish_reason "content_filter"
    unauthorized      401, echoing the key it got     empty_reply       a reply without text
    too_long          400, context_length_exceeded    error_in_200      200 with an error object of type server_error
    no_quota          429, insufficient_quota         throttle_in_200   200 with an error object, rate_limit_exceeded
    garbage           200 with something not JSON     surrogates        lone surrogates and a NUL in the text
    half_body         200 that ends half-way          no_usage          a good reply without usage
    empty_body        200 with no bytes               redirect          307 to another host
    trickle           200, one byte every 50 ms       new_limit_only    400 unless max_completion_tokens is used
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import orjson
from aiohttp import web

Body = dict[str, Any]
STICKY = ("cut", "content_filter", "empty_reply")
"""Faults that follow from the request alone, as they would with a deterministic model: asking again does not help."""


@dataclass(frozen=True)
class Plan:
    """How the server behaves when no script says otherwise."""

    latency_s: float = 0.0
    """Seconds before any answer."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of calls that meet each fault, e.g. {"throttle": 0.05}; the rest get good replies."""
    always: str | None = None
    """A fault that every call meets."""
    retry_after: str = "1"
    """The Retry-After header of `throttle`: seconds, or an HTTP date."""
    capacity: int | None = None
    """With more calls than this in flight, the surplus is throttled."""


def key_of(body: Mapping[str, Any]) -> str:
    """Names a request by what it asks: 16 hex digits of its messages, seed and sampling."""
    parts = [body.get(name) for name in ("messages", "seed", "temperature", "top_p", "max_tokens", "stop")]
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:16]


def reply_to(body: Mapping[str, Any]) -> str:
    """The text of the good reply to `body`."""
    return f"reply {hashlib.sha256(key_of(body).encode()).hexdigest()}"


class FaultServer:
    """The server; `async with` starts and stops it. `stop` and `start` again keep the port."""

    def __init__(self, plan: Plan | None = None, *, reply: Callable[[Body], str] = reply_to, port: int = 0) -> None:
        self.plan = plan or Plan()
        self.reply = reply
        self.close_on: str | None = None
        """Calls whose last message has this text find the connection closed, however often they come."""
        self.card: dict[str, Any] = {"id": "fake", "object": "model", "created": 0, "owned_by": "me", "root": "fake"}
        """What `GET /v1/models` says."""
        self.port = port
        self.asked: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.bodies: list[Body] = []
        """The last 10,000 request bodies as they came."""
        self.headers: list[dict[str, str]] = []
        self.queries: list[str] = []
        """Of every request, those for the list of models too, as they came."""
        self.arrivals: list[float] = []
        """When each of these came, in seconds of the event loop's clock."""
        self.in_flight = 0
        self.peak = 0
        """The most calls that were in flight together since the last `reset_peak`."""
        self._script: deque[str] = deque()
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/counts", self._counts)
        app.router.add_post("/plan", self._set_plan)
        app.router.add_post("/script", self._set_script)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def script(self, *faults: str) -> None:
        """What happens to the next calls, in order of arrival; "ok" is a good reply. Then the plan rules again."""
        unknown = set(faults) - set(_FAULTS) - {"ok"}
        if unknown:
            raise ValueError(f"unknown faults: {sorted(unknown)}")
        self._script.extend(faults)

    def reset_peak(self) -> None:
        self.peak = self.in_flight

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(request.url.raw_query_string)
        body: Body = orjson.loads(await request.read())
        key = key_of(body)
        self._remember(body, request.headers)
        fault = "close" if body["messages"][-1]["content"] == self.close_on else self._fault(key)
        self.asked[key] += 1
        if self.plan.latency_s:
            await asyncio.sleep(self.plan.latency_s)
        if fault is not None:
            self.faults[fault] += 1
            return await _FAULTS[fault](self, request, body)
        self.served[key] += 1
        return _json(_completion(body, self.reply(body)))

    def _remember(self, body: Body, headers: Mapping[str, str]) -> None:
        if len(self.bodies) < 10_000:
            self.bodies.append(body)
            self.headers.append(dict(headers))
            self.arrivals.append(asyncio.get_running_loop().time())

    def _fault(self, key: str) -> str | None:
        if self._script:
            scripted = self._script.popleft()
            return None if scripted == "ok" else scripted
        if self.plan.always is not None:
            return self.plan.always
        if self.plan.capacity is not None and self.in_flight > self.plan.capacity:
            return "throttle"
        for fault, share in self.plan.shares.items():
            nth = 0 if fault in STICKY else self.asked[key]
            if _draw(fault, key, nth) < share:
                return fault
        return None

    async def _models(self, request: web.Request) -> web.Response:
        self.queries.append(request.url.raw_query_string)
        return _json({"object": "list", "data": [self.card]})

    async def _counts(self, _: web.Request) -> web.Response:
        return _json({"asked": self.asked, "served": self.served, "faults": self.faults, "peak": self.peak})

    async def _set_plan(self, request: web.Request) -> web.Response:
        self.plan = replace(self.plan, **orjson.loads(await request.read()))
        return _json(asdict(self.plan))

    async def _set_script(self, request: web.Request) -> web.Response:
        self.script(*orjson.loads(await request.read()))
        return _json(list(self._script))


def _draw(fault: str, key: str, nth: int) -> float:
    """A uniform number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{fault}/{key}/{nth}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _completion(body: Body, text: str | None, *, finish: str = "stop", usage: bool = True) -> Body:
    prompt = sum(len(str(message["content"]).split()) for message in body["messages"])
    reply: Body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
    }
    if usage:
        out = len((text or "").split())
        reply["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": out,
            "total_tokens": prompt + out,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
    return reply


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def _error(message: str, kind: str, code: object = None, *, status: int) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)


Fault = Callable[[FaultServer, web.Request, Body], Awaitable[web.StreamResponse]]
_FAULTS: dict[str, Fault] = {}


def _fault(function: Fault) -> Fault:
    _FAULTS[function.__name__.strip("_")] = function
    return function


@_fault
async def _throttle(server: FaultServer, _: web.Request, __: Body) -> web.StreamResponse:
    body = {"error": {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}
    return _json(body, status=429, headers={"Retry-After": server.plan.retry_after})


@_fault
async def _overloaded(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return web.Response(status=503, text="overloaded")


@_fault
async def _http_500(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return web.Response(status=500, text="Internal Server Error")


@_fault
async def _bad_request(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return _error("top_p is out of range", "invalid_request_error", "invalid_value", status=400)


@_fault
async def _unauthorized(_: FaultServer, request: web.Request, __: Body) -> web.StreamResponse:
    given = request.headers.get("Authorization", "nothing")
    return _error(f"Incorrect API key: {given}", "authentication_error", "invalid_api_key", status=401)


@_fault
async def _new_limit_only(server: FaultServer, _: web.Request, body: Body) -> web.StreamResponse:
    if "max_tokens" not in body:
        return _json(_completion(body, server.reply(body)))
    error = {"message": "use the other one", "type": "invalid_request_error", "param": "max_tokens"}
    return _json({"error": {**error, "code": "unsupported_parameter"}}, status=400)


@_fault
async def _too_long(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return _error("too many tokens", "invalid_request_error", "context_length_exceeded", status=400)


@_fault
async def _no_quota(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return _error("You have no credit left", "insufficient_quota", "insufficient_quota", status=429)


@_fault
async def _garbage(_: FaultServer, request: web.Request, __: Body) -> web.StreamResponse:
    echo = request.headers.get("Authorization", "").encode()
    return web.Response(body=b"<html>\xff\xfe bad gateway " + echo, content_type="application/json")


@_fault
async def _half_body(server: FaultServer, request: web.Request, body: Body) -> web.StreamResponse:
    whole = orjson.dumps(_completion(body, server.reply(body)))
    response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(whole[: len(whole) // 2])
    _hang_up(request)
    return response


@_fault
async def _trickle(server: FaultServer, request: web.Request, body: Body) -> web.StreamResponse:
    whole = orjson.dumps(_completion(body, server.reply(body)))
    response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
    await response.prepare(request)
    for byte in whole:
        await response.write(bytes([byte]))
        await asyncio.sleep(0.05)
    return response


@_fault
async def _empty_body(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return web.Response(status=200, body=b"")


@_fault
async def _close(_: FaultServer, request: web.Request, __: Body) -> web.StreamResponse:
    _hang_up(request)
    return web.Response()


@_fault
async def _hang(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


@_fault
async def _cut(server: FaultServer, _: web.Request, body: Body) -> web.StreamResponse:
    return _json(_completion(body, server.reply(body)[:20], finish="length"))


@_fault
async def _content_filter(server: FaultServer, _: web.Request, body: Body) -> web.StreamResponse:
    return _json(_completion(body, server.reply(body)[:20], finish="content_filter"))


@_fault
async def _empty_reply(_: FaultServer, __: web.Request, body: Body) -> web.StreamResponse:
    return _json(_completion(body, ""))


@_fault
async def _error_in_200(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return _error("the engine stumbled", "server_error", status=200)


@_fault
async def _throttle_in_200(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return _error("slow down", "rate_limit_error", "rate_limit_exceeded", status=200)


@_fault
async def _surrogates(_: FaultServer, __: web.Request, body: Body) -> web.StreamResponse:
    """Bytes by hand: JSON escapes can spell what UTF-8 cannot."""
    whole = orjson.dumps(_completion(body, "MARK"))
    spoiled = whole.replace(b"MARK", rb"broken \ud83d half, whole \ud83d\ude00, nul \u0000.")
    return web.Response(body=spoiled, content_type="application/json")


@_fault
async def _no_usage(server: FaultServer, _: web.Request, body: Body) -> web.StreamResponse:
    return _json(_completion(body, server.reply(body), usage=False))


@_fault
async def _redirect(_: FaultServer, __: web.Request, ___: Body) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": "http://elsewhere.invalid/v1/chat/completions"})


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


async def _serve(server: FaultServer) -> None:
    await server.start()
    print(f"listening on {server.base_url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that misbehaves on request.")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--share", action="append", default=[], metavar="FAULT=SHARE", help="may be repeated")
    parser.add_argument("--retry-after", default="1", help="seconds or an HTTP date")
    parser.add_argument("--capacity", type=int, help="calls in flight before the server throttles")
    given = parser.parse_args()
    shares = {name: float(share) for name, _, share in (item.partition("=") for item in given.share)}
    plan = Plan(given.latency_ms / 1000, shares, None, given.retry_after, given.capacity)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(FaultServer(plan, port=given.port)))


if __name__ == "__main__":
    main()
