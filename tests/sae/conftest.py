"""Small SAEs with known weights, and batches of hidden states as an engine would hand them over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

CACHE = Path(__file__).parents[2] / ".build" / "cache"
D_MODEL, WIDTH = 12, 40


@dataclass(frozen=True)
class Batch:
    rows: list[int]
    hidden: Tensor
    own: Tensor


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The sums here are small: threads that wait for one another cost more than they give on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """W_enc (12, 40), W_dec (40, 12) with rows of unequal norm, and both biases."""
    made = torch.Generator().manual_seed(7)
    return {
        "W_enc": torch.randn(D_MODEL, WIDTH, generator=made),
        "W_dec": torch.randn(WIDTH, D_MODEL, generator=made) * torch.linspace(0.3, 2.0, WIDTH)[:, None],
        "b_enc": torch.randn(WIDTH, generator=made) * 0.2,
        "b_dec": torch.randn(D_MODEL, generator=made) * 0.5,
    }


@pytest.fixture
def x() -> Tensor:
    """Activations (50, 12)."""
    return torch.randn(50, D_MODEL, generator=torch.Generator().manual_seed(8)) * 3


@pytest.fixture
def batches() -> list[Batch]:
    """Two batches of rows of 0 to 9 own tokens between others, some of them repeated so that maxima tie.

    Whole numbers, so that with whole weights no sum is rounded and equal tokens have equal features in any block.
    """
    made = torch.Generator().manual_seed(9)
    found: list[Batch] = []
    for rows, lengths in (([4, 2, 7, 0], [5, 1, 0, 9]), ([1, 3], [0, 6])):
        hidden = torch.randint(-8, 9, (len(rows), 14, D_MODEL), generator=made).float()
        own = torch.zeros(len(rows), 14, dtype=torch.bool)
        for line, length in enumerate(lengths):
            own[line, 2 : 2 + length] = True
            if length >= 5:
                hidden[line, 5] = hidden[line, 3]
                hidden[line, 6] = hidden[line, 2]
        found.append(Batch(rows, hidden, own))
    return found


@pytest.fixture(scope="session")
def engine() -> TransformersEngine:
    """The embedded model in float32, converted once and kept between test runs."""
    from headwater.llm.embedded import embedded_model_folder
    from headwater.llm.transformers import TransformersEngine

    return TransformersEngine(model=embedded_model_folder(CACHE), name="smollm2-135m", cache=CACHE)
