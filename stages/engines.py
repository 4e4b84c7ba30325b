"""The engines of one run: opened when first asked for, shared by all stages, closed at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.llm.registry import EngineConfig
    from headwater.llm.types import Engine, EngineIdentity

_EVERY_THREAD = 0
"""Stands for a thread's number, which is never 0."""


class EnginePool:
    """Opens each distinct engine config once. Engines load their weights lazily, so an identity is cheap to ask for.

    An engine inside this process is shared by all threads; one outside it is opened once per thread, because its
    connections belong to the event loop that runs there. `tell` hears what will take a while.
    """

    def __init__(self, cache: Path, tell: Callable[[str], None] = lambda _: None) -> None:
        self._cache = cache
        self._tell = tell
        self._lock = threading.Lock()
        self._open: dict[tuple[EngineConfig, int], Engine] = {}
        self._described: dict[EngineConfig, EngineIdentity] = {}

    def get(self, config: EngineConfig) -> Engine:
        with self._lock:
            for key in ((config, _EVERY_THREAD), (config, threading.get_ident())):
                if key in self._open:
                    return self._open[key]
            engine = self.open(config)
            self._open[config, _EVERY_THREAD if engine.batched else threading.get_ident()] = engine
            return engine

    def open(self, config: EngineConfig) -> Engine:
        """A new engine that this pool does not know yet."""
        from headwater.llm.registry import open_engine

        return open_engine(config, cache=self._cache)

    def identity(self, config: EngineConfig) -> dict[str, Any]:
        """The engine's identity as JSON, for fingerprints and manifests."""
        with self._lock:
            known = self._described.get(config)
        if known is None:
            known = self.describe(config) or self.get(config).identity
            with self._lock:
                self._described[config] = known
        return asdict(known)

    def describe(self, config: EngineConfig) -> EngineIdentity | None:
        """The identity where it can be told without opening the engine, else None."""
        from headwater.llm.registry import EMBEDDED, local_identity

        if config.engine == EMBEDDED:
            from headwater.llm.embedded import must_convert

            if must_convert(self._cache):
                self._tell("converting the embedded model, once per workspace: about half a minute")
        return local_identity(config, cache=self._cache)

    def price_names(self, config: EngineConfig) -> tuple[str, ...]:
        """The names under which a recipe may price the engine."""
        from headwater.llm.registry import price_names

        return price_names(config)

    async def aclose_remote(self) -> None:
        """Close this thread's engines outside the process: their event loop is ending."""
        with self._lock:
            own = [key for key in self._open if key[1] == threading.get_ident()]
            ending = [self._open.pop(key) for key in own]
        for engine in ending:
            await engine.aclose()

    async def aclose(self) -> None:
        with self._lock:
            ending = list(self._open.values())
            self._open.clear()
        for engine in ending:
            await engine.aclose()
