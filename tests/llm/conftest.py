"""The embedded model, converted once and kept between test runs in `.build/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

CACHE = Path(__file__).parents[2] / ".build" / "cache"


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    pytest.importorskip("torch", reason="the local engines need the extra `local`")
    from headwater.llm.embedded import embedded_model_folder

    return embedded_model_folder(CACHE)


@pytest.fixture(scope="session")
def engine(smollm_folder: Path) -> TransformersEngine:
    """The embedded model in float32."""
    from headwater.llm.transformers import TransformersEngine

    return TransformersEngine(model=smollm_folder, name="smollm2-135m", cache=CACHE)
