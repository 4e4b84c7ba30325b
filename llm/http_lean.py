"""A lean way to POST to one plain-HTTP address: keep-alive connections over asyncio, parsed by httptools (llhttp).

It does the little a chat-completions call needs, at a third of aiohttp's processor time: no TLS, no proxy, no redirect,
no compression, no cookies. Whatever needs one of those goes through `http_aiohttp.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import httptools
from yarl import URL

from headwater.core.errors import TransientError
from headwater.llm.http_replies import UnreachableError, UnreadableError

CONNECT_S = 15.0
KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn, hence vLLM, drops an idle connection: we never write into one that is closing."""

_HAPPY_EYEBALLS_S = 0.25
"""RFC 8305: seconds before the next address of a name is tried beside the first."""
_MAX_REPLY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    """Names in lower case; of a repeated header the last one."""
    body: bytes


class LeanTransport:
    """Any number of concurrent `post` calls, each on a connection of its own, which is then used again."""

    def __init__(self, url: URL, headers: Mapping[str, str], *, deadline_s: float) -> None:
        assert url.host is not None
        assert url.port is not None
        self._address = (url.host, url.port)
        self._server = f"{url.host}:{url.port}"
        self._deadline_s = deadline_s
        lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode("ascii")
        self._idle: list[_Connection] = []

    async def post(self, body: bytes) -> Reply:
        """The whole reply.

        Raises UnreachableError, UnreadableError when what comes is half a reply or no HTTP, TransientError at the
        deadline.
        """
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                connection = self._pick() or await self._connect()
                try:
                    return await connection.exchange(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
                finally:
                    self._put_back(connection)
        except OSError as error:
            if deadline.expired():
                raise TransientError(f"{self._server} gave no complete answer within {self._deadline_s:g} s.") from None
            raise UnreachableError(f"{self._server} cannot be reached ({type(error).__name__}: {error}).") from None

    async def aclose(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _pick(self) -> _Connection | None:
        """The connection used last, if the server still holds it open."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    def _put_back(self, connection: _Connection) -> None:
        if connection.is_usable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._server), *self._address, happy_eyeballs_delay=_HAPPY_EYEBALLS_S
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, server: str) -> None:
        self.idle_since = 0.0
        self._server = server
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[Reply] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._received = 0
        self._has_begun = False
        self._keeps_alive = True

    @property
    def is_usable(self) -> bool:
        return self._keeps_alive and self._reply is None and not self._transport.is_closing()

    async def exchange(self, request: bytes) -> Reply:
        self._reply = asyncio.get_running_loop().create_future()
        self._received = 0
        self._transport.write(request)
        reply = await self._reply  # stays set when cancelled: the connection is then in the middle of something
        self._reply = None
        return reply

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self._transport.abort()  # nobody asked: whatever it is, it is no answer to what comes next
            return
        self._received += len(data)
        if self._received > _MAX_REPLY_BYTES:
            self._fail(UnreadableError(f"{self._server} sent more than {_MAX_REPLY_BYTES} bytes."))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(UnreadableError(f"{self._server} sent no HTTP ({error})."))

    def eof_received(self) -> None:
        """A body without a length ends with the connection."""
        if self._has_begun and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self._keeps_alive = False
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_begun:
            self._fail(UnreadableError(f"{self._server} sent half an answer."))
        else:
            self._fail(error or ConnectionResetError("the server closed the connection without an answer"))

    def on_message_begin(self) -> None:
        if self._reply is None or self._reply.done():
            self._keeps_alive = False  # more than was asked for: the rest must not become the next answer
        self._headers = {}
        self._body = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_begun = self._parser.get_status_code() >= 200

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        if self._has_begun:  # else an interim reply (1xx): the real one follows
            self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self._has_begun = False
        if self._reply is not None and not self._reply.done():
            reply = Reply(self._parser.get_status_code(), self._headers, b"".join(self._body))
            self._reply.set_result(reply)

    def _fail(self, error: Exception) -> None:
        self._keeps_alive = False
        self._transport.abort()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
