"""Running max-pooling over the tokens of each row, fed with blocks of pre-activations.

A batch's own tokens come as one list, row after row; a block is a slice of it and may begin or end inside a row. Both
pools break ties by the earliest token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headwater.sae.space import FeatureSpace, JumpRelu

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Pooled = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]
    """Features ascending, their maxima, and the own-token index where each is reached first."""
    _Maxima = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
    """Keys (row × width + feature) ascending, their maxima, and the number in the batch of the first token there."""


class TopKPool:
    """Max-pooling of what TopK leaves of each token: k values per token are kept, never a row of the full width."""

    def __init__(self, space: FeatureSpace, lengths: Sequence[int], k: int, floor: float) -> None:
        self._k = k
        self._floor = floor
        self._width = space.width
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._row_of_token = np.repeat(np.arange(len(self._lengths)), self._lengths)
        self._parts: list[_Maxima] = []

    def add(self, pre: Tensor, start: int) -> None:
        """Take the pre-activations (tokens, width) of the tokens from number `start` of the batch on."""
        top = pre.topk(self._k, dim=-1, sorted=False)
        values, features = top.values.cpu().numpy(), top.indices.cpu().numpy()
        at, place = np.nonzero(values > self._floor)
        token = at + start
        keys = self._row_of_token[token] * self._width + features[at, place]
        self._parts.append(_first_maxima(keys, values[at, place], token))

    def rows(self) -> Iterator[Pooled]:
        """One result per row of the batch, in order."""
        parts = self._parts or [_NOTHING]
        keys, values, tokens = _first_maxima(
            np.concatenate([part[0] for part in parts]),
            np.concatenate([part[1] for part in parts]),
            np.concatenate([part[2] for part in parts]),
        )
        rows = keys // self._width
        features = (keys % self._width).astype(np.int32)
        positions = (tokens - self._starts[rows]).astype(np.int32)
        ends = np.searchsorted(rows, np.arange(len(self._lengths)), side="right")
        for begin, end in zip(np.r_[0, ends[:-1]], ends, strict=True):
            yield features[begin:end], values[begin:end], positions[begin:end]


class DensePool:
    """Max-pooling of ReLU pre-activations: one vector of the full width per row.

    With `gated`, a JumpReLU's thresholds are applied to the maxima: a threshold doesn't change from token to token, so
    the maximum of what passes it is the overall maximum if that passes, else nothing.
    """

    def __init__(self, space: FeatureSpace, lengths: Sequence[int], floor: float, *, gated: bool) -> None:
        shape = (len(lengths), space.width)
        device = space.w_enc.device
        self._best = torch.full(shape, -torch.inf, device=device)
        self._position = torch.zeros(shape, dtype=torch.int32, device=device)
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self._starts = self._ends - np.asarray(lengths, dtype=np.int64)
        self._floor = floor
        self._threshold = space.activation.threshold if gated and isinstance(space.activation, JumpRelu) else None

    def add(self, pre: Tensor, start: int) -> None:
        """Take the pre-activations (tokens, width) of the tokens from number `start` of the batch on."""
        end = start + len(pre)
        for row in range(int(np.searchsorted(self._ends, start, side="right")), len(self._ends)):
            if self._starts[row] >= end:
                break
            begin, stop = max(start, int(self._starts[row])), min(end, int(self._ends[row]))
            if begin < stop:
                self._merge(row, pre[begin - start : stop - start], begin - int(self._starts[row]))

    def _merge(self, row: int, part: Tensor, offset: int) -> None:
        values, token = part.max(dim=0)
        better = values > self._best[row]
        self._position[row] = torch.where(better, (token + offset).int(), self._position[row])
        self._best[row] = torch.where(better, values, self._best[row])

    def rows(self) -> Iterator[Pooled]:
        """One result per row of the batch, in order."""
        active = self._best > self._floor
        if self._threshold is not None:
            active &= self._best > self._threshold
        for row, mask in enumerate(active):
            features = mask.nonzero()[:, 0]
            yield (
                features.int().cpu().numpy(),
                self._best[row, features].cpu().numpy(),
                self._position[row, features].cpu().numpy(),
            )


_NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64))


def _first_maxima(keys: NDArray[np.int64], values: NDArray[np.float32], tokens: NDArray[np.int64]) -> _Maxima:
    """Per key, ascending, its largest value and the first token that reaches it."""
    order = np.lexsort((tokens, -values, keys))
    keys = keys[order]
    first = np.r_[True, keys[1:] != keys[:-1]] if len(keys) else np.zeros(0, dtype=bool)
    kept = order[first]
    return keys[first], values[kept], tokens[kept]
