"""A feature space computes what its SAE computed, says where it fits, and is a sae-lens folder on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.sae.load import load_space
from headwater.sae.space import Activation, FeatureSpace, JumpRelu, Relu, TopK

TOP5 = TopK(5)


def _space(weights: dict[str, Tensor], activation: Activation = TOP5, **how: Any) -> FeatureSpace:
    return FeatureSpace.from_weights(weights, activation, model="org/Model", layer=3, **how)


def test_encoding_a_hand_computed_case() -> None:
    space = FeatureSpace.from_weights(
        {
            "W_enc": torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]]),
            "W_dec": torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0]]),
            "b_enc": torch.tensor([0.5, -1.0, 0.0]),
            "b_dec": torch.tensor([1.0, 1.0]),
        },
        TopK(1),
        model="m",
        layer=0,
    )
    x = torch.tensor([[3.0, 2.0], [1.0, -4.0]])
    # x - b_dec = (2, 1) and (0, -5); pre = (2.5, 1, -1) and (0.5, -11, -5)
    assert space.pre_activations(x).tolist() == [[2.5, 1.0, -1.0], [0.5, -11.0, -5.0]]
    assert space.encode(x).tolist() == [[2.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert space.decode(space.encode(x)).tolist() == [[3.5, 1.0], [1.5, 1.0]]


def test_topk_never_keeps_a_negative_value(weights: dict[str, Tensor], x: Tensor) -> None:
    weights["b_enc"] -= 30.0
    values = _space(weights).encode(x)
    assert (values >= 0).all()
    assert (values > 0).sum(dim=1).max() < 5


@pytest.mark.parametrize("decoder_norm_scales", [False, True])
@pytest.mark.parametrize("subtract_b_dec", [False, True])
def test_folding_scale_and_norms_changes_neither_values_nor_reconstruction(
    weights: dict[str, Tensor], x: Tensor, subtract_b_dec: bool, decoder_norm_scales: bool
) -> None:
    scale = 0.37
    space = _space(weights, subtract_b_dec=subtract_b_dec, decoder_norm_scales=decoder_norm_scales, input_scale=scale)
    w = {name: tensor.double() for name, tensor in weights.items()}
    norms = w["W_dec"].norm(dim=1) if decoder_norm_scales else torch.ones(40).double()
    scaled = x.double() * scale
    pre = ((scaled - w["b_dec"] if subtract_b_dec else scaled) @ w["W_enc"] + w["b_enc"]) * norms
    kept = pre >= pre.sort(dim=1).values[:, -5:-4]
    acts = (pre * kept).relu()
    x_hat = (acts / norms @ w["W_dec"] + w["b_dec"]) / scale

    torch.testing.assert_close(space.encode(x).double(), acts, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(space.decode(space.encode(x)).double(), x_hat, rtol=1e-4, atol=1e-4)
    assert space.input_scale == scale


@pytest.mark.parametrize(
    "activation", [TopK(5), JumpRelu(torch.linspace(0, 6, 40)), Relu()], ids=lambda a: type(a).__name__
)
@pytest.mark.parametrize("subtract_b_dec", [False, True])
def test_a_saved_space_is_read_by_sae_lens_and_encodes_the_same_there(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path, activation: Activation, subtract_b_dec: bool
) -> None:
    from headwater.sae.saelens import quiet_sae_lens

    quiet_sae_lens()
    from sae_lens import SAE

    space = _space(weights, activation, subtract_b_dec=subtract_b_dec, decoder_norm_scales=True, input_scale=0.37)
    space.save(tmp_path / "sae")
    theirs = SAE.load_from_disk(tmp_path / "sae")

    assert torch.equal(theirs.encode(x), space.encode(x))
    torch.testing.assert_close(theirs.decode(theirs.encode(x)), space.decode(space.encode(x)))
    assert theirs.cfg.metadata.model_name == "org/Model"
    assert theirs.cfg.metadata.hook_name == "blocks.3.hook_resid_post"


def test_a_space_survives_the_disk_unchanged(weights: dict[str, Tensor], x: Tensor, tmp_path: Path) -> None:
    space = _space(weights, input_scale=0.37, facts={"steps": 12, "explained_variance": 0.8})
    space.save(tmp_path)
    again = load_space(tmp_path)
    assert torch.equal(again.encode(x), space.encode(x))
    assert (again.model, again.layer, again.input_scale, again.facts) == ("org/Model", 3, 0.37, dict(space.facts))


def test_saving_twice_gives_the_same_bytes(weights: dict[str, Tensor], tmp_path: Path) -> None:
    for name in ("a", "b"):
        _space(weights, facts={"steps": 12}).save(tmp_path / name)
    for name in ("cfg.json", "sae_weights.safetensors", "space.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_space_of_a_newer_format_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    _space(weights).save(tmp_path)
    about = json.loads((tmp_path / "space.json").read_text())
    (tmp_path / "space.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ConfigError, match=r"format 99, but this Headwater reads 1"):
        load_space(tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "org/Model", "layer": 3, "d_model": 576}, ("12", "576")),
        ({"model": "org/Model", "layer": 7, "d_model": 12}, ("block 3", "layer 7")),
        ({"model": "org/Other", "layer": 3, "d_model": 12}, ("org/Model", "org/Other")),
    ],
)
def test_a_space_that_does_not_fit_says_both_sides(
    weights: dict[str, Tensor], asked: dict[str, Any], words: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _space(weights).check_fits(**asked)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.todo


def test_a_space_fits_its_own_model_under_its_short_name(weights: dict[str, Tensor]) -> None:
    _space(weights).check_fits(model="Model", layer=3, d_model=12)


def test_blocks_cover_all_tokens_and_stay_below_the_bound(weights: dict[str, Tensor]) -> None:
    blocks = list(_space(weights).blocks(1_000_000))
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].stop) == (0, 1_000_000)
    assert max(block.stop - block.start for block in blocks) * 40 * 4 <= 32 * 2**20
    assert list(_space(weights).blocks(0)) == []


@pytest.mark.parametrize("name", ["W_dec", "b_enc", "b_dec"])
def test_weights_that_do_not_fit_one_another_are_named(weights: dict[str, Tensor], name: str) -> None:
    weights[name] = weights[name][:-1]
    with pytest.raises(ConfigError, match=name):
        _space(weights)


def test_weights_that_are_not_finite_are_refused(weights: dict[str, Tensor]) -> None:
    weights["W_enc"][3, 4] = torch.nan
    with pytest.raises(ConfigError, match=r"W_enc.*finite"):
        _space(weights)


@pytest.mark.parametrize("activation", [TopK(0), TopK(41), JumpRelu(torch.zeros(39))])
def test_an_activation_that_does_not_fit_the_width_is_refused(
    weights: dict[str, Tensor], activation: Activation
) -> None:
    with pytest.raises(ConfigError, match="width 40"):
        _space(weights, activation)
