"""Training: sae-lens' mathematics computed sparsely, on texts that are held apart, the same every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headwater.core.errors import ConfigError
from headwater.llm.types import Message
from headwater.sae.activations import Activations, collect_activations
from headwater.sae.config import SaeTrainConfig
from headwater.sae.metrics import measure_space
from headwater.sae.saelens import quiet_sae_lens
from headwater.sae.space import JumpRelu, TopK
from headwater.sae.train import _rate, _split, train_space

if TYPE_CHECKING:
    from headwater.llm.transformers import TransformersEngine

D_MODEL, TRUE_FEATURES, ACTIVE = 32, 48, 3
SMALL = SaeTrainConfig(width=64, k=ACTIVE, steps=300, batch_tokens=256, learning_rate=5e-3)


@pytest.fixture(scope="module")
def activations() -> Activations:
    """4,000 tokens in 100 texts, each a positive sum of 3 out of 48 directions, around a mean."""
    random = np.random.default_rng(3)
    directions = random.normal(size=(TRUE_FEATURES, D_MODEL))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    codes = np.zeros((4000, TRUE_FEATURES))
    for code in codes:
        code[random.choice(TRUE_FEATURES, ACTIVE, replace=False)] = random.uniform(5, 10, ACTIVE)
    tokens = (codes @ directions + 4.0).astype(np.float32)
    return Activations(tokens, np.repeat(np.arange(100, dtype=np.int32), 40), model="org/Model", layer=6, dropped=2)


def _lens(*, rescale: bool, centre: bool) -> Any:
    quiet_sae_lens()
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig

    torch.manual_seed(0)
    config = TopKTrainingSAEConfig(
        d_in=D_MODEL, d_sae=64, k=4, rescale_acts_by_decoder_norm=rescale, apply_b_dec_to_input=centre
    )
    sae = TopKTrainingSAE(config)
    with torch.no_grad():
        sae.W_enc.add_(torch.randn_like(sae.W_enc) * 0.2)
        sae.W_dec.mul_(torch.linspace(0.5, 3.0, 64)[:, None])
        sae.b_enc.copy_(torch.randn(64) * 0.1)
        sae.b_dec.copy_(torch.randn(D_MODEL))
    return sae


@pytest.mark.parametrize("n_dead", [0, 1, 5, 40])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("rescale", [False, True])
def test_the_sparse_loss_and_its_gradients_are_those_of_sae_lens(rescale: bool, centre: bool, n_dead: int) -> None:
    from sae_lens.saes.sae import TrainStepInput

    from headwater.sae.sparse_step import sparse_topk_loss

    sae = _lens(rescale=rescale, centre=centre)
    x = torch.randn(32, D_MODEL, generator=torch.Generator().manual_seed(1)) * 3
    dead = torch.zeros(64, dtype=torch.bool)
    dead[torch.randperm(64, generator=torch.Generator().manual_seed(2))[:n_dead]] = True

    theirs = sae.training_forward_pass(TrainStepInput(x, {}, dead, 0, False))
    theirs.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in sae.named_parameters()}
    sae.zero_grad()
    loss, fired = sparse_topk_loss(sae, x, 4, dead)
    loss.backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(loss, theirs.loss)
    assert torch.equal(fired, (theirs.feature_acts > 0).any(dim=0))
    for name, parameter in sae.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)
        assert expected[name].abs().sum() > 0


def test_a_topk_space_learns_the_directions_that_made_the_data(activations: Activations) -> None:
    space, report = train_space(activations, SMALL, seed=0)
    assert report.explained_variance > 0.9
    assert report.l0 <= ACTIVE
    assert report.dead_share < 0.1
    assert isinstance(space.activation, TopK)
    assert (space.model, space.layer, space.width, space.d_model) == ("org/Model", 6, 64, D_MODEL)


@pytest.mark.parametrize("architecture", ["batchtopk", "jumprelu"])
def test_the_other_architectures_reach_about_k_features_per_token(activations: Activations, architecture: str) -> None:
    config = SMALL.model_copy(update={"architecture": architecture})
    space, report = train_space(activations, config, seed=0)
    assert isinstance(space.activation, JumpRelu)
    assert report.explained_variance > 0.8
    assert ACTIVE * 0.5 < report.l0 < ACTIVE * 2


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(activations: Activations) -> None:
    config = SMALL.model_copy(update={"steps": 20})
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    (one, report), (two, again), (other, _) = (train_space(activations, config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.w_enc, two.w_enc)
    assert torch.equal(one.w_dec, two.w_dec)
    assert report.facts() == again.facts() == {k: v for k, v in one.facts.items() if k not in ("config", "seed")}
    assert not torch.equal(one.w_enc, other.w_enc)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_reported_is_measured_on_texts_that_were_held_out(activations: Activations) -> None:
    space, report = train_space(activations, SMALL.model_copy(update={"steps": 20}), seed=5)
    train, held_out = _split(activations.rows, SMALL.held_out_share, seed=5)
    assert not set(activations.rows[train]) & set(activations.rows[held_out])
    assert (report.train_tokens, report.held_out_tokens, report.dropped_tokens) == (3600, 400, 2)
    expected = measure_space(space, activations.tokens[held_out])
    assert report.explained_variance == expected.explained_variance
    assert report.l0 == expected.l0


def test_values_count_in_input_of_mean_norm_sqrt_d_model(activations: Activations) -> None:
    space, report = train_space(activations, SMALL.model_copy(update={"steps": 5}), seed=5)
    train, _ = _split(activations.rows, SMALL.held_out_share, seed=5)
    mean_norm = np.linalg.norm(activations.tokens[train].astype(np.float64), axis=1).mean()
    assert space.input_scale == report.input_scale == pytest.approx(D_MODEL**0.5 / mean_norm)
    torch.testing.assert_close((space.w_dec * space.input_scale).norm(dim=1), torch.ones(64))


def test_progress_hears_of_every_step(activations: Activations) -> None:
    heard: list[tuple[int, int, float]] = []
    config = SMALL.model_copy(update={"steps": 4})
    _, report = train_space(activations, config, seed=0, progress=lambda *step: heard.append(step))
    assert [(step, total) for step, total, _ in heard] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert heard[-1][2] == report.loss


def test_k_falls_linearly_and_then_stays() -> None:
    quiet_sae_lens()
    from headwater.sae.architectures import annealed_k

    config = SaeTrainConfig(width=512, k=20, k_start=200, k_anneal_share=0.5, steps=100)
    assert [annealed_k(config, step) for step in (0, 25, 50, 99)] == [200, 110, 20, 20]
    assert annealed_k(SaeTrainConfig(k=20), 0) == 20


def test_annealing_trains_with_the_larger_k_first(activations: Activations) -> None:
    config = SMALL.model_copy(update={"k_start": 12, "steps": 100})
    space, report = train_space(activations, config, seed=0)
    plain, _ = train_space(activations, SMALL.model_copy(update={"steps": 100}), seed=0)
    assert space.activation == plain.activation == TopK(ACTIVE)
    assert not torch.allclose(space.w_dec, plain.w_dec)
    assert report.l0 == ACTIVE


def test_the_learning_rate_rises_holds_and_falls() -> None:
    config = SaeTrainConfig(steps=100, warmup_share=0.1, decay_share=0.2)
    assert [_rate(config, step) for step in (0, 4, 9, 50, 79)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    assert [_rate(config, step) for step in (80, 90, 99)] == pytest.approx([1.0, 0.5, 0.05])


def test_fewer_tokens_than_a_batch_still_train(activations: Activations) -> None:
    few = Activations(activations.tokens[:80], activations.rows[:80], model="m", layer=0)
    _, report = train_space(few, SMALL.model_copy(update={"steps": 3}), seed=0)
    assert (report.train_tokens, report.held_out_tokens, report.epochs) == (40, 40, 3.0)


def test_one_text_is_too_few(activations: Activations) -> None:
    with pytest.raises(ConfigError, match="1 texts are too few"):
        train_space(Activations(activations.tokens[:40], activations.rows[:40], model="m", layer=0), SMALL, seed=0)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_activations_without_a_finite_norm_are_refused(activations: Activations, value: float) -> None:
    tokens = np.full_like(activations.tokens, value)
    with pytest.raises(ConfigError, match="all zero or hold values that aren't finite"):
        train_space(Activations(tokens, activations.rows, model="m", layer=0), SMALL, seed=0)


def test_a_training_that_diverges_says_so(activations: Activations) -> None:
    config = SMALL.model_copy(update={"learning_rate": 1e30, "steps": 20})
    with pytest.raises(ConfigError, match="diverged"):
        train_space(activations, config, seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("architecture", ["topk", "batchtopk", "jumprelu"])
def test_training_on_a_gpu_gives_a_space_as_good(activations: Activations, architecture: str) -> None:
    config = SMALL.model_copy(update={"architecture": architecture})
    space, report = train_space(activations, config, seed=0, device="cuda")
    assert space.w_enc.device.type == "cpu"
    assert report.explained_variance > 0.8


@pytest.mark.parametrize(
    "bad",
    [
        {"widht": 64},
        {"k": 64, "width": 64},
        {"k_start": 5, "k": 20},
        {"k_start": 4096},
        {"architecture": "jumprelu", "k_start": 100},
        {"architecture": "gated"},
        {"warmup_share": 0.6, "decay_share": 0.6},
        {"steps": 0},
    ],
)
def test_a_config_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SaeTrainConfig(**bad)


CHATS = [[Message("user", text)] for text in ("Name three rivers.", "", "Add 2 and 5.", "Why is the sky blue?")]


def test_collected_activations_are_those_of_the_engine(engine: TransformersEngine, tmp_path: Path) -> None:
    found = collect_activations(engine, CHATS, 2, tmp_path / "acts")
    for batch in engine.hidden_states(CHATS, 2):
        for line, row in enumerate(batch.rows):
            np.testing.assert_array_equal(found.tokens[found.rows == row], batch.hidden[line][batch.own[line]].numpy())
    assert set(found.rows.tolist()) == {0, 2, 3}
    assert (found.model, found.layer, found.dropped) == ("smollm2-135m", 2, 0)
    again = Activations.open(tmp_path / "acts")
    np.testing.assert_array_equal(again.tokens, found.tokens)
    np.testing.assert_array_equal(again.rows, found.rows)


def test_tokens_of_high_norm_are_dropped_and_counted(engine: TransformersEngine, tmp_path: Path) -> None:
    every = collect_activations(engine, CHATS, 2, tmp_path / "all")
    norms = np.linalg.norm(every.tokens, axis=1)
    factor = float(np.sort(norms)[-3] / np.median(norms)) * 1.0001
    kept = collect_activations(engine, CHATS, 2, tmp_path / "kept", high_norm_factor=factor)
    usual = norms <= factor * np.median(norms)
    assert (~usual).sum() == kept.dropped == 2
    np.testing.assert_array_equal(kept.tokens, every.tokens[usual])
    np.testing.assert_array_equal(kept.rows, every.rows[usual])
    assert kept.median_norm == pytest.approx(np.median(norms))
    assert (tmp_path / "kept" / "tokens.f32").stat().st_size == usual.sum() * 576 * 4


def test_texts_without_tokens_cannot_be_collected(engine: TransformersEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        collect_activations(engine, [[Message("user", "")]], 2, tmp_path)


OFFLINE = """
import os, socket, sys
def refuse(*_): raise SystemExit("a connection was opened")
socket.socket.connect = socket.getaddrinfo = refuse
import numpy as np
import headwater.sae.config
assert "torch" not in sys.modules
import headwater.sae.load, headwater.sae.extract, headwater.sae.train
assert not {"sae_lens", "wandb", "transformers"} & sys.modules.keys()
from headwater.sae.train import Activations, SaeTrainConfig, train_space
data = Activations(np.random.default_rng(0).normal(size=(40, 8)).astype("float32"), np.arange(40) // 4, "m", 0)
train_space(data, SaeTrainConfig(width=16, k=2, steps=2), 0)
assert "sae_lens" in sys.modules and os.environ["WANDB_MODE"] == "disabled"
"""


def test_training_opens_no_connection_and_sae_lens_is_only_imported_for_it(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
