"""Draws follow the distribution that temperature and top-p define, and depend on nothing but the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="the local engines need the extra `local`")

from headwater.llm.sampling import draw_tokens  # noqa: E402

# p = 0.5, 0.25, 0.125, 0.125 at temperature 1
LOGITS = torch.log(torch.tensor([0.125, 0.5, 0.25, 0.125]))


def draw(logits: Tensor, temperature: float, top_p: float, uniform: float) -> int:
    return int(draw_tokens(logits.unsqueeze(0), [temperature], [top_p], [uniform])[0])


def test_temperature_zero_takes_the_largest_logit() -> None:
    assert draw(LOGITS, 0, 1, 0.999) == 1


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 0), (0.99, 3)])
def test_a_uniform_number_picks_by_cumulative_probability(uniform: float, token: int) -> None:
    """By hand: sorted cumulative probabilities are 0.5, 0.75, 0.875, 1."""
    drawn = draw(LOGITS, 1, 1, uniform)
    assert drawn == token or {drawn, token} == {0, 3}  # the two equal ones may stand in either order


@pytest.mark.parametrize(("uniform", "token"), [(0.66, 1), (0.67, 2), (0.999, 2)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(uniform: float, token: int) -> None:
    """By hand: 0.6 needs the tokens of 0.5 and 0.25, renormalised to 2/3 and 1/3."""
    assert draw(LOGITS, 1, 0.6, uniform) == token


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert draw(LOGITS, 1, 1e-6, 0.999) == 1


def test_draws_follow_the_nucleus_computed_independently() -> None:
    """χ² against a nucleus built with numpy's sort, for a nucleus of over 64 tokens."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=400).astype(np.float32)
    p = np.exp(logits.astype(np.float64) / 1.3)
    p /= p.sum()
    order = np.argsort(-p)
    keep = order[: np.searchsorted(np.cumsum(p[order]), 0.8) + 1]
    expected = np.zeros_like(p)
    expected[keep] = p[keep] / p[keep].sum()
    n = 40_000
    drawn = draw_tokens(torch.from_numpy(logits).expand(n, -1), [1.3] * n, [0.8] * n, rng.random(n).tolist())
    counts = np.bincount(drawn.numpy(), minlength=400)
    assert len(keep) > 64
    assert counts[expected == 0].sum() == 0
    chi2 = ((counts[keep] - n * expected[keep]) ** 2 / (n * expected[keep])).sum()
    degrees = len(keep) - 1
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 3000)
    temperatures, top_ps, uniforms = [0, 0.5, 1, 2, 1, 5], [1, 0.9, 0.5, 0.99, 0.1, 1], [0.1, 0.9, 0.5, 0.7, 0.3, 0.2]
    together = draw_tokens(logits, temperatures, top_ps, uniforms).tolist()
    alone = [draw(row, t, p, u) for row, t, p, u in zip(logits, temperatures, top_ps, uniforms, strict=True)]
    assert together == alone


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 100), float("-inf"))
    logits[0, 42] = 0.0
    assert draw(logits[0], 1, 1, 0.9999999) == 42
