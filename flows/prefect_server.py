"""Prefect's own API for the length of one run: a child process that serves it on a local port and dies with us.

Prefect can start such a child by itself. It is started here instead because ours begins to load before this process
has imported Prefect (about 2 s are saved), sits in a session of its own (Ctrl+C at a terminal would otherwise kill
the API that a graceful stop still needs), and ends when this process does, however it ends: a SIGKILL of Prefect's
own leaves the server running.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headwater.core.errors import PermanentError
from headwater.core.locks import file_lock

STARTUP_SECONDS = 180
_STOP_SECONDS = 5
_BACKLOG = 128

_UNNEEDED_SERVICES = (
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "DB_VACUUM",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)
"""Services that look after deployments, workers and automations: a single run has none."""


def quiet_environment(home: Path) -> dict[str, str]:
    """Prefect's settings for a run of ours: a home of our own, nothing sent anywhere, no chatter."""
    return {
        "PREFECT_HOME": str(home.resolve()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    }


class LocalApi:
    """A running server child. `url` is known at once; `wait_ready` blocks until it answers."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._log_path = home / "server.log"
        with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            with self._log_path.open("wb") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "headwater.flows.prefect_server", str(listening.fileno())],
                    env={**_without_prefect(os.environ), **quiet_environment(home), **_server_environment(home)},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(listening.fileno(),),
                    start_new_session=True,
                )

    def wait_ready(self) -> None:
        """Wait for the first answer. Connections queue on the open socket, so one long request is enough.

        Raises PermanentError when the server ends or stays silent.
        """
        from urllib.error import URLError
        from urllib.request import ProxyHandler, build_opener

        try:
            with build_opener(ProxyHandler({})).open(f"{self.url}/health", timeout=STARTUP_SECONDS) as reply:
                reply.read()
        except (URLError, OSError) as error:
            raise PermanentError(
                f"Prefect's local API did not start: {error}.",
                todo=f"Its log is {self._log_path}; `--direct` runs the same stages without Prefect.",
            ) from error

    def stop(self) -> None:
        """End the child; its last events are written first."""
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@contextlib.contextmanager
def local_api(home: Path) -> Iterator[LocalApi]:
    """A local Prefect API with its database in `home`; stopped at the end of the block."""
    api = LocalApi(home)
    try:
        yield api
    finally:
        api.stop()


def _without_prefect(environment: os._Environ[str]) -> dict[str, str]:
    """The user's own Prefect settings are about the user's own server."""
    return {key: value for key, value in environment.items() if not key.startswith("PREFECT_")}


def _server_environment(home: Path) -> dict[str, str]:
    return {
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home.resolve() / 'prefect.db'}",
        **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in _UNNEEDED_SERVICES},
    }


def _serve(handle: int) -> None:
    """Body of the child: serve until the parent's end of our standard input closes."""
    over = threading.Event()
    threading.Thread(target=_end_with_parent, args=(over,), daemon=True).start()
    gc.disable()  # until it serves: collecting while thousands of classes are made takes a quarter of the import
    import uvicorn
    from prefect.server.api.server import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with file_lock(Path(os.environ["PREFECT_HOME"]) / ".starting"):  # two that create one database spoil it
                await super().startup(sockets)
            gc.freeze()
            gc.enable()

    server = Server(uvicorn.Config(create_app(), log_level="error", lifespan="on", fd=handle))

    def end() -> None:
        over.wait()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    server.run()
    os._exit(0)


def _end_with_parent(over: threading.Event) -> None:
    """Wait for the parent to close our input or to die; then leave, gracefully if that is quick."""
    sys.stdin.buffer.read()
    over.set()
    time.sleep(_STOP_SECONDS / 2)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
