"""The activations' quantiles, counted in bins rather than kept."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.stages.fac.features import _binned, _quantiles


def test_quantiles_from_bins_are_those_of_the_values_themselves() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.lognormal(1.0, 0.8, size=rng.integers(0, 50)).astype(np.float32) for _ in range(400)]
    counts = _binned(rows[:150]) + _binned(rows[150:])

    found = _quantiles(counts)

    assert counts.sum() == sum(map(len, rows))
    for q, value in found.items():
        assert value == pytest.approx(np.quantile(np.concatenate(rows), float(q)), rel=0.01)


def test_without_activations_there_are_no_quantiles() -> None:
    assert _quantiles(_binned([])) == {}
