"""The engines of one run: opened when first asked for, shared by all stages, closed at the end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.llm.registry import EngineConfig
    from headwater.llm.types import Engine


class EnginePool:
    """Opens each distinct engine config once. Engines load their weights lazily, so an identity is cheap to ask for."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._open: dict[EngineConfig, Engine] = {}

    def get(self, config: EngineConfig) -> Engine:
        if config not in self._open:
            from headwater.llm.registry import open_engine

            self._open[config] = open_engine(config, cache=self._cache)
        return self._open[config]

    def identity(self, config: EngineConfig) -> dict[str, Any]:
        """The engine's identity as JSON, for fingerprints and manifests."""
        return asdict(self.get(config).identity)

    async def aclose_remote(self) -> None:
        """Close the engines outside this process: their connections belong to the event loop that is ending."""
        for config, engine in list(self._open.items()):
            if not engine.batched:
                del self._open[config]
                await engine.aclose()

    async def aclose(self) -> None:
        while self._open:
            _, engine = self._open.popitem()
            await engine.aclose()
