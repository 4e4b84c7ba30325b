"""Quality of a space: by hand, against scikit-learn, and against a model patched by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.llm.types import Message
from headwater.sae import space as space_module
from headwater.sae.metrics import LossRecovered, loss_recovered, measure_space
from headwater.sae.space import FeatureSpace, Relu, TopK

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

LAYER = 15
CHATS = [
    [Message("user", "Write a haiku about rain.")],
    [Message("user", "How many legs do three spiders have? Explain.")],
    [Message("user", "")],
    [Message("user", "Name a prime.")],
]


def _space(w_enc: Tensor, w_dec: Tensor, b_dec: Tensor) -> FeatureSpace:
    weights = {"W_enc": w_enc, "W_dec": w_dec, "b_enc": torch.zeros(w_enc.shape[1]), "b_dec": b_dec}
    return FeatureSpace.from_weights(weights, Relu(), model="m", layer=LAYER)


def _perfect(d_model: int) -> FeatureSpace:
    """Every direction and its opposite: ReLU(x) - ReLU(-x) = x."""
    both = torch.cat([torch.eye(d_model), -torch.eye(d_model)])
    return _space(both.T, both, torch.zeros(d_model))


def _constant(b_dec: Tensor) -> FeatureSpace:
    d_model = len(b_dec)
    return _space(torch.zeros(d_model, d_model), torch.zeros(d_model, d_model), b_dec)


def test_quality_of_a_hand_computed_case() -> None:
    # x̂ keeps the first coordinate's positive part: errors 0, 4, 1 + 0; |x - mean|² sums to 2 + 8/3 with mean (0, 2/3)
    space = _space(torch.eye(2), torch.diag(torch.tensor([1.0, 0.0])), torch.zeros(2))
    found = measure_space(space, torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    assert found.explained_variance == pytest.approx(1 - 5 / (2 + 8 / 3))
    assert found.l0 == pytest.approx(2 / 3)
    assert found.dead_share == 0.0
    assert found.tokens == 3


def test_explained_variance_is_scikit_learns_variance_weighted_r2(weights: dict[str, Tensor], x: Tensor) -> None:
    space = FeatureSpace.from_weights(weights, TopK(5), model="m", layer=0)
    x_hat = space.decode(space.encode(x))
    expected = r2_score(x.numpy(), x_hat.numpy(), multioutput="variance_weighted")
    assert measure_space(space, x).explained_variance == pytest.approx(expected, rel=1e-5)


def test_l0_and_dead_share_count_what_fires(weights: dict[str, Tensor], x: Tensor) -> None:
    weights["b_enc"][:10] = -1e3
    space = FeatureSpace.from_weights(weights, TopK(5), model="m", layer=0)
    matrix = space.encode(x).numpy()
    found = measure_space(space, x)
    assert found.l0 == pytest.approx(np.count_nonzero(matrix) / len(x))
    assert found.dead_share == pytest.approx(np.mean(~matrix.any(axis=0)))
    assert found.dead_share >= 10 / 40


def test_a_perfect_sae_explains_everything_and_the_mean_nothing(x: Tensor) -> None:
    assert measure_space(_perfect(12), x).explained_variance == pytest.approx(1.0, abs=1e-9)
    assert measure_space(_constant(x.mean(dim=0)), x).explained_variance == pytest.approx(0.0, abs=1e-6)


def test_a_large_mean_does_not_pass_for_explained_variance(x: Tensor) -> None:
    assert measure_space(_constant((x + 1000).mean(dim=0)), x + 1000).explained_variance == pytest.approx(0, abs=1e-4)


def test_blocks_do_not_change_the_measurement(
    weights: dict[str, Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = FeatureSpace.from_weights(weights, TopK(5), model="m", layer=0)
    whole = measure_space(space, x)
    monkeypatch.setattr(space_module, "BLOCK_BYTES", 7 * 4 * 40)
    parts = measure_space(space, x)
    assert (parts.l0, parts.dead_share) == (whole.l0, whole.dead_share)
    assert parts.explained_variance == pytest.approx(whole.explained_variance, rel=1e-6)


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_too_few_tokens_are_refused(x: Tensor, n_tokens: int) -> None:
    with pytest.raises(ConfigError, match="without variance"):
        measure_space(_perfect(12), x[:n_tokens])


def test_recovered_is_one_for_clean_and_zero_for_ablated() -> None:
    assert LossRecovered(10, 2.0, 2.0, 6.0).recovered == 1.0
    assert LossRecovered(10, 2.0, 6.0, 6.0).recovered == 0.0
    assert LossRecovered(10, 2.0, 3.0, 6.0).recovered == 0.75
    assert LossRecovered(10, 2.0, 3.0, 2.0).recovered is None


@pytest.fixture(scope="module")
def measured(engine: TransformersEngine) -> dict[str, LossRecovered]:
    return {
        "perfect": loss_recovered(engine, CHATS, _perfect(576)),
        "empty": loss_recovered(engine, CHATS, _constant(torch.zeros(576))),
    }


def test_a_perfect_sae_recovers_the_loss_and_an_empty_one_none_of_it(measured: dict[str, LossRecovered]) -> None:
    assert measured["perfect"].recovered == pytest.approx(1.0, abs=1e-4)
    assert measured["empty"].recovered == pytest.approx(0.0, abs=1e-4)
    assert measured["perfect"].ce_clean < measured["empty"].ce_ablated


def test_losses_equal_those_of_single_rows_patched_by_hand(
    engine: TransformersEngine, measured: dict[str, LossRecovered]
) -> None:
    found = measured["empty"]
    losses: dict[str, list[float]] = {"clean": [], "ablated": []}
    for chat in engine.chat_format.encode(CHATS, roles=("user",), max_tokens=512):
        places = [i for i in range(1, len(chat.own)) if chat.own[i] and chat.own[i - 1]]
        for kind, collected in losses.items():

            def zero(_module: object, _args: object, output: Tensor, own: list[bool] = chat.own) -> Tensor:
                return output.masked_fill(torch.tensor(own)[None, :, None], 0.0)

            handle = engine.model.model.layers[LAYER].register_forward_hook(zero) if kind == "ablated" else None
            with torch.no_grad():
                logprobs = engine.model(torch.tensor([chat.token_ids])).logits[0].log_softmax(-1) if places else None
            if handle:
                handle.remove()
            if logprobs is not None:
                collected.extend(-float(logprobs[i - 1, chat.token_ids[i]]) for i in places)
    assert found.tokens == len(losses["clean"]) > 15
    assert found.ce_clean == pytest.approx(np.mean(losses["clean"]), rel=1e-4)
    assert found.ce_ablated == pytest.approx(np.mean(losses["ablated"]), rel=1e-4)
    assert found.ce_sae == pytest.approx(found.ce_ablated)


def test_the_model_is_left_as_it_was(engine: TransformersEngine) -> None:
    block = engine.model.model.layers[LAYER]
    ids = torch.tensor([engine.chat_format.encode(CHATS[:1], roles=("user",), max_tokens=512)[0].token_ids])
    with torch.no_grad():
        hooks, logits = len(block._forward_hooks), engine.model(ids).logits
        loss_recovered(engine, CHATS[:1], _constant(torch.zeros(576)))
        assert len(block._forward_hooks) == hooks
        assert torch.equal(engine.model(ids).logits, logits)


def test_texts_without_two_tokens_in_a_row_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match="no prediction"):
        loss_recovered(engine, [[Message("user", "")]], _perfect(576))
