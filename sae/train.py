"""Training an SAE on collected activations with sae-lens' training classes.

sae-lens' trainer is left out: it pulls batches from a running model, logs to wandb, and steps dense matrices that are
nearly all zero. What is kept of it: Adam, gradients clipped to norm 1, and a count of steps since a feature last fired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headwater.core.errors import ConfigError
from headwater.sae.activations import Activations, collect_activations
from headwater.sae.config import SaeTrainConfig
from headwater.sae.metrics import measure_space
from headwater.sae.saelens import quiet_sae_lens
from headwater.sae.space import FeatureSpace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headwater.sae.architectures import Trainee

    Indices = NDArray[np.int64]

__all__ = ["Activations", "SaeTrainConfig", "TrainingReport", "collect_activations", "train_space"]

Progress = Callable[[int, int, float], None]
"""Called after every step with: steps done, steps in all, the step's loss."""

_MAX_GRADIENT_NORM = 1.0
_MEASURED_TOKENS = 65536
"""At most so many tokens are measured on, evenly spread, so that measuring never takes long beside training."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What came out of a training."""

    train_tokens: int
    held_out_tokens: int
    dropped_tokens: int
    """Left out because of their norm when the activations were collected."""
    steps: int
    epochs: float
    """How often the average training token was seen."""
    loss: float
    """Squared error per token plus auxiliary terms in the last step, on scaled input."""
    explained_variance: float
    """On the held-out texts."""
    l0: float
    """Features per token, on the held-out texts."""
    dead_share: float
    """Share of the features that no training token fires, measured on at most 65,536 of them."""
    input_scale: float
    """sqrt(d_model) divided by the mean norm of the training tokens."""
    seconds: float

    def facts(self) -> dict[str, Any]:
        """All but the time, which differs from run to run."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}


def train_space(
    activations: Activations,
    config: SaeTrainConfig,
    seed: int,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> tuple[FeatureSpace, TrainingReport]:
    """Train an SAE; the same arguments on the same machine give the same weights.

    Whole texts are held out to measure on. Input is scaled so that its mean norm is sqrt(d_model), and b_dec starts at
    the mean activation. Raises ConfigError when there are too few texts to hold one out.
    """
    started = time.monotonic()
    quiet_sae_lens()
    from headwater.sae.architectures import build_trainee

    train, held_out = _split(activations.rows, config.held_out_share, seed)
    scale, mean = _input_statistics(activations.tokens, train)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        trainee = build_trainee(config, activations.tokens.shape[1])
        trainee.sae.to(device)
        trainee.sae.b_dec.data.copy_(torch.from_numpy(mean * scale))
        loss = _fit(trainee, _batches(activations.tokens, train, config, seed), config, scale, progress)
    trainee.sae.to("cpu")
    space = FeatureSpace.from_weights(
        {name: getattr(trainee.sae, name) for name in ("W_enc", "W_dec", "b_enc", "b_dec")},
        trainee.activation(),
        model=activations.model,
        layer=activations.layer,
        subtract_b_dec=trainee.sae.cfg.apply_b_dec_to_input,
        decoder_norm_scales=True,
        input_scale=scale,
    )
    quality = measure_space(space, activations.tokens[_spread(held_out)])
    report = TrainingReport(
        train_tokens=len(train),
        held_out_tokens=len(held_out),
        dropped_tokens=activations.dropped,
        steps=config.steps,
        epochs=config.steps * min(config.batch_tokens, len(train)) / len(train),
        loss=loss,
        explained_variance=quality.explained_variance,
        l0=quality.l0,
        dead_share=measure_space(space, activations.tokens[_spread(train)]).dead_share,
        input_scale=scale,
        seconds=time.monotonic() - started,
    )
    return space.with_facts({"config": config.model_dump(), "seed": seed, **report.facts()}), report


def _fit(
    trainee: Trainee,
    batches: Iterator[NDArray[np.float32]],
    config: SaeTrainConfig,
    scale: float,
    progress: Progress | None,
) -> float:
    sae = trainee.sae
    optimizer = torch.optim.Adam(trainee.parameter_groups(config.learning_rate), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(config, step))
    since_fired = torch.zeros(config.width, dtype=torch.int64, device=sae.W_enc.device)
    loss = torch.tensor(torch.nan)
    for step, batch in zip(range(config.steps), batches, strict=False):
        x = torch.from_numpy(batch).to(sae.W_enc.device) * scale
        loss, fired = trainee.loss(x, step, since_fired > config.dead_after_steps)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(sae.parameters(), _MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        since_fired += 1
        since_fired[fired] = 0
        if progress is not None:
            progress(step + 1, config.steps, loss.item())
    if not bool(torch.isfinite(loss)):
        raise ConfigError(f"The training of the SAE diverged: its loss is {loss.item()}.", todo="Lower learning_rate.")
    return loss.item()


def _rate(config: SaeTrainConfig, step: int) -> float:
    """Factor of the learning rate: up over the warm-up, flat, down to nothing over the decay."""
    warm_up, decay = config.warmup_share * config.steps, config.decay_share * config.steps
    rising = (step + 1) / warm_up if step + 1 < warm_up else 1.0
    falling = (config.steps - step) / decay if config.steps - step < decay else 1.0
    return min(rising, falling)


def _split(rows: NDArray[np.int32], held_out_share: float, seed: int) -> tuple[Indices, Indices]:
    """Token indices to train on and to measure on: whole texts, the held-out ones drawn by `seed`."""
    texts = np.unique(rows)
    held_out = round(held_out_share * len(texts)) or 1
    if held_out >= len(texts):
        raise ConfigError(
            f"{len(texts)} texts are too few to train an SAE on and hold some out.", todo="Give more texts."
        )
    drawn = np.random.default_rng(seed).permutation(texts)[:held_out]
    is_held_out = np.isin(rows, drawn)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _input_statistics(tokens: NDArray[np.float32], train: Indices) -> tuple[float, NDArray[np.float32]]:
    """The input scale, and the mean activation (d_model,) in the tokens' own unit.

    Raises ConfigError for activations that aren't finite, or all zero.
    """
    norms, total = 0.0, np.zeros(tokens.shape[1])
    for part in np.array_split(train, max(1, len(train) // _MEASURED_TOKENS)):
        block = tokens[part].astype(np.float64)
        norms += float(np.linalg.norm(block, axis=1).sum())
        total += block.sum(axis=0)
    if not 0 < norms < np.inf:
        raise ConfigError(
            "The model's activations are all zero or hold values that aren't finite.",
            todo="Run the model in float32, and check that its weights are whole.",
        )
    return float(tokens.shape[1] ** 0.5 * len(train) / norms), (total / len(train)).astype(np.float32)


def _batches(
    tokens: NDArray[np.float32], train: Indices, config: SaeTrainConfig, seed: int
) -> Iterator[NDArray[np.float32]]:
    """Batches (batch_tokens, d_model) without end: each epoch in a new order, what doesn't fill a batch left out."""
    size = min(config.batch_tokens, len(train))
    random = np.random.default_rng([seed, 1])
    while True:
        order = random.permutation(train)
        for start in range(0, len(order) - size + 1, size):
            # Sorted, a batch reads a memory map from front to back; its order means nothing to the loss.
            yield tokens[np.sort(order[start : start + size])]


def _spread(indices: Indices) -> Indices:
    return indices[:: -(-len(indices) // _MEASURED_TOKENS)]
