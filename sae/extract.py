"""Which features a text fires: the maximum of every feature over the text's own tokens, kept sparse.

g_i(X) = max over own tokens t of z_i(t), with z the SAE's features (FAC, arXiv 2602.10388, section 5). Encoding and
max-pooling run together, block by block in one bounded buffer; a (tokens × width) matrix of a whole batch never exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from headwater.core.errors import ConfigError
from headwater.sae.pool import DensePool, TopKPool
from headwater.sae.space import FeatureSpace, TopK

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Mode = Literal["topk", "raw"]


class TokenBatch(Protocol):
    """What is read of an engine's batch of hidden states."""

    @property
    def rows(self) -> Sequence[int]:
        """Length batch: which text each line is."""
        ...

    @property
    def hidden(self) -> Tensor:
        """Shape (batch, seq, d_model)."""
        ...

    @property
    def own(self) -> Tensor:
        """Shape (batch, seq), bool: true for the text's own tokens, false for template and padding."""
        ...


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """The features that one text fires."""

    row: int
    n_tokens: int
    """Number of own tokens."""
    features: NDArray[np.int32]
    """Shape (active,), ascending."""
    values: NDArray[np.float32]
    """Shape (active,): the maximum over own tokens, in the space's unit; above `min_value`."""
    positions: NDArray[np.int32]
    """Shape (active,): index among the own tokens where the maximum is reached first."""


@torch.no_grad()
def extract_features(
    batches: Iterable[TokenBatch], space: FeatureSpace, *, mode: Mode = "topk", min_value: float = 0.0
) -> Iterator[RowFeatures]:
    """Stream the features of every row of `batches`, in their order.

    `topk` applies the SAE's own activation (TopK, JumpReLU thresholds, ReLU) before pooling; `raw` pools
    ReLU(pre-activations), which is what the FAC authors' code measures. Only values above `min_value` (in the space's
    unit, at least 0) are kept. Computed in float32 on the device where the hidden states lie.
    """
    for batch in batches:
        space = space.to(batch.hidden.device)
        yield from _batch_features(batch, space, mode, max(0.0, min_value))


def _batch_features(batch: TokenBatch, space: FeatureSpace, mode: Mode, floor: float) -> Iterator[RowFeatures]:
    own = batch.own
    counts = own.sum(dim=1)
    tokens = batch.hidden[own].float()
    lengths: list[int] = counts.tolist()
    pool: DensePool | TopKPool
    if mode == "topk" and isinstance(space.activation, TopK):
        pool = TopKPool(space, lengths, space.activation.k, floor)
    else:
        pool = DensePool(space, lengths, floor, gated=mode == "topk")
    buffer: Tensor | None = None
    for block in space.blocks(len(tokens)):
        part = tokens[block]
        if buffer is None:
            buffer = torch.empty(len(part), space.width, device=part.device)
        pool.add(space.pre_activations(part, out=buffer[: len(part)]), block.start)
    for row, n_tokens, (features, values, positions) in zip(batch.rows, lengths, pool.rows(), strict=True):
        yield RowFeatures(int(row), n_tokens, features, values, positions)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How far the features of a second forward pass (bfloat16) are from those of the first (float32)."""

    rows: int
    pairs: int
    """(row, feature) pairs active in either."""
    differing_share: float
    """Share of `pairs` that are active in one of the two only."""
    max_relative_change: float
    """Largest |second - first| / first over the pairs active in both; 0.0 when there are none."""


def bf16_disagreement(reference: Iterable[RowFeatures], other: Iterable[RowFeatures]) -> Disagreement:
    """Compare the same rows, whatever their order, after a float32 pass (`reference`) and a bfloat16 one (`other`).

    Raises ConfigError when the two don't hold the same rows.
    """
    ours = {features.row: features for features in reference}
    theirs = {features.row: features for features in other}
    if ours.keys() != theirs.keys():
        raise ConfigError(
            f"The two passes hold different rows: {sorted(ours.keys() ^ theirs.keys())[:5]} are in one of them only.",
            todo="Extract both from the same conversations.",
        )
    pairs = differing = 0
    largest = 0.0
    for row, first in ours.items():
        second = theirs[row]
        common, at_first, at_second = np.intersect1d(
            first.features, second.features, assume_unique=True, return_indices=True
        )
        union = len(first.features) + len(second.features) - len(common)
        pairs += union
        differing += union - len(common)
        if len(common):
            before, after = first.values[at_first].astype(np.float64), second.values[at_second]
            largest = max(largest, float((np.abs(after - before) / before).max()))
    return Disagreement(len(ours), pairs, differing / pairs if pairs else 0.0, largest)
