"""The model and the SAE that the claims on real texts share: the SAE never sees a text that a claim measures on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headwater.llm.types import Message
from headwater.sae.config import SaeTrainConfig
from headwater.tests.claims.sources import SOURCES, read_source

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine
    from headwater.sae.space import FeatureSpace

LAYER = 15
TRAIN_TEXTS = {"tweets": 3500, "gsm8k": 1200, "hh": 1200, "instructions": 150}
"""How many texts of each source the SAE is trained on; claims measure on the others."""


@dataclass(frozen=True)
class RealSpace:
    space: FeatureSpace
    held_out: Mapping[str, Sequence[str]]
    """Per source the texts that the SAE has not seen, in an order drawn once."""
    explained_variance: float
    train_tokens: int

    def __str__(self) -> str:
        return (
            f"SmolLM2-135M, layer {LAYER}, TopK SAE of {self.space.width:,} features trained on {self.train_tokens:,} "
            f"tokens of the same sources (explained variance {self.explained_variance:.2f} on held-out texts), which "
            "saw none of the texts measured here"
        )


@pytest.fixture(scope="session")
def engine(embedded_cache: Path) -> TransformersEngine:
    from headwater.llm.embedded import embedded_model_folder
    from headwater.llm.transformers import TransformersEngine

    return TransformersEngine(model=embedded_model_folder(embedded_cache), name="smollm2-135m")


@pytest.fixture(scope="session")
def real(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> RealSpace:
    from headwater.sae.train import collect_activations, train_space

    train: list[str] = []
    held_out: dict[str, list[str]] = {}
    for number, source in enumerate(SOURCES):
        texts = read_source(source)
        order = np.random.default_rng(number).permutation(len(texts))
        shuffled = [texts[index] for index in order]
        train += shuffled[: TRAIN_TEXTS[source]]
        held_out[source] = shuffled[TRAIN_TEXTS[source] :]
    chats = [[Message("user", text)] for text in train]
    activations = collect_activations(engine, chats, LAYER, tmp_path_factory.mktemp("real"), max_tokens=128)
    config = SaeTrainConfig(width=4096, k=20, steps=1500, held_out_share=0.05)
    space, report = train_space(activations, config, seed=0)
    return RealSpace(space, held_out, report.explained_variance, report.train_tokens)
