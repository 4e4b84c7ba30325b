"""The two ways to the server, byte by byte: framing, connections used again, TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from yarl import URL

from headwater.core.errors import TransientError
from headwater.llm import http_lean
from headwater.llm.http_lean import LeanTransport
from headwater.llm.http_replies import UnreachableError, UnreadableError

OK = b"HTTP/1.1 200 OK\r\n"


class RawServer:
    """Answers every request on every connection with the next of `replies`, byte for byte."""

    def __init__(
        self, *replies: bytes, then_close: bool = False, piece: int = 1 << 20, afterthought: bytes = b""
    ) -> None:
        self.replies = list(replies)
        self.then_close = then_close
        self.piece = piece
        self.afterthought = afterthought
        """Sent 20 ms after every reply."""
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                reply = self.replies.pop(0)
                for start in range(0, len(reply), self.piece):
                    writer.write(reply[start : start + self.piece])
                    await asyncio.sleep(0)
                if self.then_close:
                    break
                if self.afterthought:
                    await asyncio.sleep(0.02)
                    writer.write(self.afterthought)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def talking_to(server: RawServer, deadline_s: float = 5) -> AsyncIterator[LeanTransport]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport = LeanTransport(URL(f"http://127.0.0.1:{port}/v1/x"), {"X-Key": "k"}, deadline_s=deadline_s)
    try:
        yield transport
    finally:
        await transport.aclose()
        listener.close()


def sized(body: bytes, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def test_the_request_is_plain_http_with_host_length_and_body() -> None:
    server = RawServer(sized(b"hi"))
    async with talking_to(server) as transport:
        await transport.post(b'{"a": 1}')
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    assert line == b"POST /v1/x HTTP/1.1"
    assert set(headers[1:]) == {b"X-Key: k", b"Content-Length: 8"}
    assert headers[0].startswith(b"Host: 127.0.0.1:")
    assert body == b'{"a": 1}'


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "reply",
    [
        sized(b"hello world"),
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: t\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"hello world"),
        b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + sized(b"hello world"),
    ],
    ids=["sized", "chunked", "continue", "hints"],
)
async def test_a_reply_is_read_however_it_is_framed_and_cut(reply: bytes, piece: int) -> None:
    server = RawServer(reply, reply, piece=piece)
    async with talking_to(server) as transport:
        for _ in range(2):
            got = await transport.post(b"{}")
            assert (got.status, got.body) == (200, b"hello world")
    assert server.connections == 1


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reply = OK + b"X: y\r\n\r\nhello"
    server = RawServer(reply, reply, then_close=True)
    async with talking_to(server) as transport:
        assert [(await transport.post(b"{}")).body for _ in range(2)] == [b"hello", b"hello"]
    assert server.connections == 2


async def test_header_names_come_in_lower_case() -> None:
    async with talking_to(RawServer(sized(b"", b"RETRY-After: 3\r\n"))) as transport:
        assert (await transport.post(b"{}")).headers["retry-after"] == "3"


async def test_a_connection_the_server_wants_closed_is_not_used_again() -> None:
    server = RawServer(sized(b"1", b"Connection: close\r\n"), sized(b"2"))
    async with talking_to(server) as transport:
        assert [(await transport.post(b"{}")).body for _ in range(2)] == [b"1", b"2"]
    assert server.connections == 2


async def test_a_connection_closed_while_idle_is_not_used_again() -> None:
    server = RawServer(sized(b"1"), sized(b"2"), then_close=True)
    async with talking_to(server) as transport:
        await transport.post(b"{}")
        await asyncio.sleep(0.05)
        assert (await transport.post(b"{}")).body == b"2"


async def test_a_connection_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_lean, "KEEPALIVE_S", 0.05)
    server = RawServer(sized(b"1"), sized(b"2"))
    async with talking_to(server) as transport:
        await transport.post(b"{}")
        await asyncio.sleep(0.1)
        await transport.post(b"{}")
    assert server.connections == 2


@pytest.mark.parametrize("stray", [sized(b"STRAY"), sized(b"STRAY")[:-2], sized(b"STRAY")[:9]])
async def test_what_nobody_asked_for_never_becomes_the_next_answer(stray: bytes) -> None:
    server = RawServer(sized(b"1") + stray, sized(b"2"))
    async with talking_to(server) as transport:
        assert [(await transport.post(b"{}")).body for _ in range(2)] == [b"1", b"2"]
    assert server.connections == 2


async def test_what_comes_while_nobody_waits_never_becomes_the_next_answer() -> None:
    server = RawServer(sized(b"1"), sized(b"2"), afterthought=sized(b"STRAY"))
    async with talking_to(server) as transport:
        await transport.post(b"{}")
        await asyncio.sleep(0.1)
        assert (await transport.post(b"{}")).body == b"2"
    assert server.connections == 2


async def test_a_call_past_its_deadline_leaves_no_answer_behind_for_the_next() -> None:
    late = RawServer(sized(b"late")[:-1], sized(b"2"))
    async with talking_to(late, deadline_s=0.1) as transport:
        with pytest.raises(TransientError, match=r"within 0.1 s"):
            await transport.post(b"{}")
        assert (await transport.post(b"{}")).body == b"2"
    assert late.connections == 2


@pytest.mark.parametrize(
    "reply",
    [sized(b"hello")[:-1], OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", b"SSH-2.0-OpenSSH_9\r\n",
     OK + b"Content-Length: five\r\n\r\nhello", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"],
    ids=["half a body", "half a chunk", "no HTTP", "no length", "no chunk size"],
)  # fmt: skip
async def test_half_a_reply_and_what_is_no_http_are_unreadable(reply: bytes) -> None:
    async with talking_to(RawServer(reply, then_close=True)) as transport:
        with pytest.raises(UnreadableError):
            await transport.post(b"{}")


@pytest.mark.parametrize("reply", [b"", OK[:9], OK, b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_connection_that_closes_before_an_answer_reached_nobody(reply: bytes) -> None:
    async with talking_to(RawServer(reply, then_close=True)) as transport:
        with pytest.raises(UnreachableError, match="closed the connection without an answer"):
            await transport.post(b"{}")


async def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_lean, "_MAX_REPLY_BYTES", 1000)
    async with talking_to(RawServer(sized(b"x" * 2000))) as transport:
        with pytest.raises(UnreadableError, match="more than 1000 bytes"):
            await transport.post(b"{}")


async def test_concurrent_calls_get_their_own_answers() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            await asyncio.sleep(int(body) % 7 / 1000)
            writer.write(sized(body))

    server = RawServer()
    server.serve = echo  # type: ignore[method-assign]
    async with talking_to(server) as transport:

        async def one(number: int) -> bytes:
            return (await transport.post(str(number).encode())).body

        for _ in range(3):
            assert await asyncio.gather(*map(one, range(100))) == [str(number).encode() for number in range(100)]


TLS_CALL = """
import asyncio, sys
from headwater.core.errors import PermanentError
from headwater.llm.openai import OpenAIEngine
from headwater.llm.types import ChatRequest, Message, Sampling
engine = OpenAIEngine(base_url=sys.argv[1], model="fake", attempts=1)
async def main():
    try:
        print((await engine.complete(ChatRequest("a", (Message("user", "hi"),), Sampling(), 1))).text)
    except PermanentError as error:
        print("refused:", error)
    await engine.aclose()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    told = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    told += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([openssl, *told, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_tls_is_spoken_and_the_certificate_checked(certificate: tuple[Path, Path], is_trusted: bool) -> None:
    import ssl

    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    body = b'{"choices": [{"message": {"content": "over TLS"}, "finish_reason": "stop"}]}'
    server = RawServer(sized(body, b"Content-Type: application/json\r\n"))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{listener.sockets[0].getsockname()[1]}/v1"
    environment = {**os.environ, "SSL_CERT_FILE": str(cert)} if is_trusted else {**os.environ, "SSL_CERT_FILE": ""}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TLS_CALL, url, stdout=asyncio.subprocess.PIPE, env=environment
    )
    said, _ = await process.communicate()
    listener.close()
    if is_trusted:
        assert said.decode().strip() == "over TLS"
    else:
        assert said.decode().startswith("refused: The certificate of localhost:")
        assert server.requests == []
