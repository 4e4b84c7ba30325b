"""Features of rows: fused and blockwise, yet exactly what a dense computation gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.llm.types import Message
from headwater.sae import space as space_module
from headwater.sae.extract import Mode, RowFeatures, bf16_disagreement, extract_features
from headwater.sae.space import Activation, FeatureSpace, JumpRelu, Relu, TopK

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

ACTIVATIONS: dict[str, Activation] = {
    "top5": TopK(5),
    "top40": TopK(40),
    "jumprelu": JumpRelu(torch.arange(40) * 1.5),
    "relu": Relu(),
}


def _space(weights: dict[str, Tensor], activation: Activation) -> FeatureSpace:
    """Weights and scale are multiples of powers of two: every sum is exact, whatever order it is taken in."""
    whole = {name: (tensor * 4).round() for name, tensor in weights.items()}
    return FeatureSpace.from_weights(whole, activation, model="m", layer=1, input_scale=0.5)


def _dense(batches: list[Any], space: FeatureSpace, mode: str, min_value: float) -> list[tuple[Any, ...]]:
    """One row at a time, one (tokens, width) matrix each, numpy's argmax (first on ties)."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        for line, row in enumerate(batch.rows):
            tokens = batch.hidden[line][batch.own[line]]
            dense = space.encode(tokens) if mode == "topk" else space.pre_activations(tokens).relu()
            matrix = dense.numpy()
            if not len(matrix):
                found.append((row, 0, [], [], []))
                continue
            best = matrix.max(axis=0)
            features = np.flatnonzero(best > min_value)
            found.append((row, len(matrix), features, best[features], matrix.argmax(axis=0)[features]))
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", ["topk", "raw"])
@pytest.mark.parametrize("min_value", [0.0, 45.0])
@pytest.mark.parametrize("tokens_per_block", [1, 4, 1000])
def test_fused_extraction_equals_a_dense_computation(
    *,
    weights: dict[str, Tensor],
    batches: list[Any],
    activation: str,
    mode: Mode,
    min_value: float,
    tokens_per_block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = _space(weights, ACTIVATIONS[activation])
    monkeypatch.setattr(space_module, "BLOCK_BYTES", tokens_per_block * 4 * space.width)

    found = list(extract_features(batches, space, mode=mode, min_value=min_value))

    expected = _dense(batches, space, mode, min_value)
    assert len(found) == len(expected) == 6
    assert sum(len(row.features) for row in found) > 20
    for got, (row, n_tokens, features, values, positions) in zip(found, expected, strict=True):
        assert (got.row, got.n_tokens) == (row, n_tokens)
        np.testing.assert_array_equal(got.features, features)
        np.testing.assert_array_equal(got.values, values)
        np.testing.assert_array_equal(got.positions, positions)


def test_a_tie_goes_to_the_earlier_token_and_the_fixture_really_has_ties(
    weights: dict[str, Tensor], batches: list[Any]
) -> None:
    row = next(extract_features(batches, _space(weights, TopK(5))))
    assert {0, 1} & set(row.positions.tolist())
    assert not {3, 4} & set(row.positions.tolist())  # tokens 3 and 4 repeat tokens 1 and 0


def test_a_row_without_own_tokens_fires_nothing(weights: dict[str, Tensor], batches: list[Any]) -> None:
    rows = {row.row: row for row in extract_features(batches, _space(weights, TopK(5)))}
    assert rows[7].n_tokens == rows[1].n_tokens == 0
    assert len(rows[7].features) == len(rows[1].features) == 0


def test_template_tokens_never_count(weights: dict[str, Tensor], batches: list[Any]) -> None:
    before = list(extract_features(batches, _space(weights, TopK(5))))
    for batch in batches:
        batch.hidden[~batch.own] = 1e4
    after = list(extract_features(batches, _space(weights, TopK(5))))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.features, other.features)
        np.testing.assert_array_equal(one.values, other.values)


def test_results_are_compact_numpy_arrays_with_ascending_features(
    weights: dict[str, Tensor], batches: list[Any]
) -> None:
    for row in extract_features(batches, _space(weights, TopK(5))):
        assert row.features.dtype == np.int32
        assert row.values.dtype == np.float32
        assert row.positions.dtype == np.int32
        assert (np.diff(row.features) > 0).all()
        assert row.features.size == 0 or row.positions.max() < row.n_tokens


def test_half_precision_hidden_states_are_measured_in_float32(weights: dict[str, Tensor], batches: list[Any]) -> None:
    space = _space(weights, TopK(5))
    halves = [type(batch)(batch.rows, batch.hidden.bfloat16(), batch.own) for batch in batches]
    rounded = [type(batch)(batch.rows, batch.hidden.float(), batch.own) for batch in halves]
    for one, other in zip(extract_features(halves, space), extract_features(rounded, space), strict=True):
        np.testing.assert_array_equal(one.values, other.values)


def test_memory_stays_at_one_block_however_long_the_batch_is(
    weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = _space(weights, TopK(5))
    monkeypatch.setattr(space_module, "BLOCK_BYTES", 64 * 4 * space.width)
    sizes = []
    whole = FeatureSpace.pre_activations

    def measured(self: FeatureSpace, x: Tensor, out: Tensor | None = None) -> Tensor:
        sizes.append(len(x))
        return whole(self, x, out)

    monkeypatch.setattr(FeatureSpace, "pre_activations", measured)
    hidden = torch.randn(8, 100, 12)
    own = torch.ones(8, 100, dtype=torch.bool)
    list(extract_features([SimpleNamespace(rows=list(range(8)), hidden=hidden, own=own)], space))
    assert sum(sizes) == 800
    assert max(sizes) == 64


def test_real_texts_fire_what_the_whole_model_says(engine: TransformersEngine) -> None:
    layer, width = 3, 200
    made = torch.Generator().manual_seed(0)
    weights = {"W_enc": torch.randn(576, width, generator=made), "W_dec": torch.randn(width, 576, generator=made)}
    weights |= {"b_enc": torch.zeros(width), "b_dec": torch.zeros(576)}
    space = FeatureSpace.from_weights(weights, TopK(8), model="smollm2-135m", layer=layer)
    chats = [[Message("user", text)] for text in ("Name three rivers of Spain.", "", "Is 91 prime?")]

    found = {row.row: row for row in extract_features(engine.hidden_states(chats, layer), space)}

    for row, chat in enumerate(engine.chat_format.encode(chats, max_tokens=512)):
        own = torch.tensor(chat.own, dtype=torch.bool)
        assert found[row].n_tokens == int(own.sum())
        if not chat.own:
            continue
        with torch.no_grad():
            states = engine.model(torch.tensor([chat.token_ids]), output_hidden_states=True).hidden_states
        matrix = space.encode(states[layer + 1][0, own]).numpy()
        features = np.flatnonzero(matrix.max(axis=0))
        np.testing.assert_array_equal(found[row].features, features)
        np.testing.assert_allclose(found[row].values, matrix.max(axis=0)[features], rtol=1e-3)
        np.testing.assert_array_equal(found[row].positions, matrix.argmax(axis=0)[features])


def _row(row: int, active: dict[int, float]) -> RowFeatures:
    features = np.array(list(active), dtype=np.int32)
    return RowFeatures(row, 3, features, np.array(list(active.values()), dtype=np.float32), np.zeros_like(features))


def test_disagreement_counts_pairs_that_differ_and_the_largest_change() -> None:
    reference = [_row(0, {1: 2.0, 5: 4.0}), _row(1, {2: 1.0})]
    other = [_row(1, {2: 1.5}), _row(0, {1: 2.0, 6: 4.0})]
    found = bf16_disagreement(reference, other)
    assert (found.rows, found.pairs) == (2, 4)
    assert found.differing_share == pytest.approx(2 / 4)
    assert found.max_relative_change == pytest.approx(0.5)


def test_disagreement_needs_the_same_rows() -> None:
    with pytest.raises(ConfigError, match="different rows"):
        bf16_disagreement([_row(0, {1: 1.0})], [_row(3, {1: 1.0})])
