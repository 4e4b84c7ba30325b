"""Drawing one token per row, so that what a row draws follows from its own seed and not from its batch mates.

Every draw uses one uniform number u of the row's own stream: the token is the one at which the cumulative probability
of the kept tokens passes u (inverse transform sampling). Only the round-off of the logits ties a row to its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_LOOK = (64, 1024)
"""Sizes of the candidate lists tried before a whole vocabulary is sorted: a nucleus is nearly always smaller."""


def draw_tokens(
    logits: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> Tensor:
    """One token id per row, (rows,), from `logits` (rows, vocabulary), float32.

    Temperature divides the logits and 0 takes the largest; then the smallest set of tokens whose probability reaches
    top-p is kept (nucleus sampling, Holtzman et al. 2020) and renormalised. `uniforms` lie in [0, 1).
    """
    tokens = logits.argmax(-1)
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not drawn:
        return tokens
    scaled = logits[drawn] / _column([temperatures[row] for row in drawn], logits)
    top_p = _column([top_ps[row] for row in drawn], logits)
    uniform = _column([uniforms[row] for row in drawn], logits)
    tokens[drawn] = _from_nucleus(scaled, top_p, uniform)
    return tokens


def _from_nucleus(scaled: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    total = scaled.logsumexp(-1, keepdim=True)
    tokens = torch.empty(len(scaled), dtype=torch.long, device=scaled.device)
    waiting = torch.arange(len(scaled), device=scaled.device)
    for size in (*_FIRST_LOOK, scaled.shape[-1]):
        look = min(size, scaled.shape[-1])
        values, ids = scaled[waiting].topk(look, dim=-1)
        probabilities = (values - total[waiting]).exp()
        cumulative = probabilities.cumsum(-1)
        covered = cumulative[:, -1] >= top_p[waiting, 0]
        if look == scaled.shape[-1]:
            covered.fill_(True)
        done = waiting[covered]
        choice = _choose(probabilities[covered], cumulative[covered], top_p[done], uniform[done])
        tokens[done] = ids[covered].gather(-1, choice).squeeze(-1)
        waiting = waiting[~covered]
        if not len(waiting):
            break
    return tokens


def _choose(probabilities: Tensor, cumulative: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Column of the chosen token among tokens sorted by falling probability, (rows, 1)."""
    kept = (cumulative - probabilities < top_p).sum(-1, keepdim=True).clamp(min=1)
    mass = cumulative.gather(-1, kept - 1)
    return torch.searchsorted(cumulative, uniform * mass, right=True).minimum(kept - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)
