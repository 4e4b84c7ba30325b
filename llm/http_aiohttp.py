"""POST through aiohttp: TLS, proxies and compression, for the hosted servers."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from headwater.core.errors import PermanentError, TransientError
from headwater.llm.http_lean import CONNECT_S, KEEPALIVE_S, Reply
from headwater.llm.http_replies import UnreachableError, UnreadableError


class AiohttpTransport:
    """Any number of concurrent `post` calls over pooled connections. `proxy` is the URL of an HTTP proxy."""

    def __init__(self, url: URL, headers: Mapping[str, str], *, deadline_s: float, proxy: str | None) -> None:
        self._url = url
        self._proxy = proxy
        self._server = f"{url.host}:{url.port}"
        self._deadline_s = deadline_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_S),
        )

    async def post(self, body: bytes) -> Reply:
        """The whole reply.

        Raises UnreachableError, UnreadableError when what comes is half a reply or no HTTP, TransientError at the
        deadline, PermanentError for a certificate that is not trusted.
        """
        try:
            async with self._session.post(self._url, data=body, allow_redirects=False, proxy=self._proxy) as response:
                content = await response.read()
                return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, content)
        except aiohttp.ClientConnectorCertificateError as error:
            what = f"The certificate of {self._server} is not trusted ({error.certificate_error})."
            raise PermanentError(
                what, todo="Set SSL_CERT_FILE to your authority's certificate, or fix the server's."
            ) from None
        except aiohttp.ConnectionTimeoutError:
            raise UnreachableError(f"{self._server} cannot be reached within {CONNECT_S:g} s.") from None
        except TimeoutError:
            raise TransientError(f"{self._server} gave no complete answer within {self._deadline_s:g} s.") from None
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            raise UnreadableError(f"{self._server} sent half an answer ({type(error).__name__}).") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{self._server} cannot be reached ({type(error).__name__}: {error}).") from None

    async def aclose(self) -> None:
        await self._session.close()
