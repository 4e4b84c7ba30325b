"""sae-lens' training classes, one way to build each, to step it, and to turn it into a feature space.

Imported only where an SAE is trained: sae-lens takes seconds to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.saes.jumprelu_sae import JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig
from sae_lens.saes.sae import TrainingSAE, TrainStepInput
from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
from torch import Tensor

from headwater.sae.config import SaeTrainConfig
from headwater.sae.space import Activation, JumpRelu, TopK
from headwater.sae.sparse_step import sparse_topk_loss

DECODER_INIT_NORM = 0.1
"""Norm of every decoder row at the start (Anthropic, April 2024)."""
THRESHOLD_RATE, THRESHOLD_TURNS = 0.01, 20.0
"""How fast BatchTopK's threshold follows the batches: sae-lens' default, or faster, so that a short training forgets
where it began."""
JUMPRELU_BANDWIDTH = 0.5
"""How far from its threshold a pre-activation still moves it."""
THRESHOLD_HASTE = 10.0
"""JumpReLU's thresholds learn so many times faster than the weights, whose growth they can't follow otherwise: after
200 steps L0 was 180 where 32 was aimed at."""


class Trainee(Protocol):
    """An SAE while it is trained."""

    sae: TrainingSAE[Any]

    def parameter_groups(self, rate: float) -> list[dict[str, Any]]:
        """The parameters for an optimizer with learning rate `rate`."""
        ...

    def loss(self, x: Tensor, step: int, dead: Tensor) -> tuple[Tensor, Tensor]:
        """The loss on x (tokens, d_model) at step `step`, and which features fired: bool (width,).

        `dead` marks the features (width,) that the auxiliary loss may revive.
        """
        ...

    def activation(self) -> Activation:
        """How to measure with the trained weights, in units of pre-activations times decoder norms."""
        ...


def build_trainee(config: SaeTrainConfig, d_model: int) -> Trainee:
    """A freshly initialised SAE, which draws from torch's global generator."""
    match config.architecture:
        case "topk":
            return _TopK(config, d_model)
        case "batchtopk":
            return _BatchTopK(config, d_model)
        case "jumprelu":
            return _JumpRelu(config, d_model)


def annealed_k(config: SaeTrainConfig, step: int) -> int:
    """k at step `step`: from k_start to k, linearly over the first `k_anneal_share` of the steps."""
    if config.k_start is None:
        return config.k
    done = min(1.0, step / max(1.0, config.k_anneal_share * config.steps))
    return round(config.k_start + (config.k - config.k_start) * done)


@dataclass
class _TopK:
    config: SaeTrainConfig
    d_model: int

    def __post_init__(self) -> None:
        self.sae = TopKTrainingSAE(
            TopKTrainingSAEConfig(
                d_in=self.d_model,
                d_sae=self.config.width,
                k=self.config.k,
                aux_loss_coefficient=self.config.aux_coefficient,
                decoder_init_norm=DECODER_INIT_NORM,
            )
        )

    def parameter_groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.sae.parameters()), "lr": rate}]

    def loss(self, x: Tensor, step: int, dead: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_topk_loss(self.sae, x, annealed_k(self.config, step), dead)

    def activation(self) -> Activation:
        return TopK(self.config.k)


@dataclass
class _BatchTopK:
    config: SaeTrainConfig
    d_model: int

    def __post_init__(self) -> None:
        self.sae = BatchTopKTrainingSAE(
            BatchTopKTrainingSAEConfig(
                d_in=self.d_model,
                d_sae=self.config.width,
                k=self.config.k,
                aux_loss_coefficient=self.config.aux_coefficient,
                topk_threshold_lr=min(1.0, max(THRESHOLD_RATE, THRESHOLD_TURNS / self.config.steps)),
                decoder_init_norm=DECODER_INIT_NORM,
            )
        )

    def parameter_groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.sae.parameters()), "lr": rate}]

    def loss(self, x: Tensor, step: int, dead: Tensor) -> tuple[Tensor, Tensor]:
        self.sae.activation_fn.k = annealed_k(self.config, step)
        return _dense_loss(self.sae, x, step, dead, {})

    def activation(self) -> Activation:
        return JumpRelu(torch.full((self.config.width,), float(self.sae.topk_threshold)))


@dataclass
class _JumpRelu:
    """With Gemma Scope 2's quadratic penalty around a target L0, which needs no sweep of coefficients to find k."""

    config: SaeTrainConfig
    d_model: int

    def __post_init__(self) -> None:
        self.sae = JumpReLUTrainingSAE(
            JumpReLUTrainingSAEConfig(
                d_in=self.d_model,
                d_sae=self.config.width,
                jumprelu_sparsity_loss_mode="quadratic",
                target_l0=self.config.k,
                l0_coefficient=self.config.l0_coefficient,
                jumprelu_bandwidth=JUMPRELU_BANDWIDTH,
                decoder_init_norm=DECODER_INIT_NORM,
            )
        )

    def parameter_groups(self, rate: float) -> list[dict[str, Any]]:
        others = [parameter for name, parameter in self.sae.named_parameters() if name != "threshold"]
        return [{"params": others, "lr": rate}, {"params": [self.sae.threshold], "lr": rate * THRESHOLD_HASTE}]

    def loss(self, x: Tensor, step: int, dead: Tensor) -> tuple[Tensor, Tensor]:
        if step == 0:
            self._start_at_target(x)
        warmed = min(1.0, (step + 1) / self.config.steps)
        return _dense_loss(self.sae, x, step, dead, {"l0": self.config.l0_coefficient * warmed})

    @torch.no_grad()
    def _start_at_target(self, x: Tensor) -> None:
        """Thresholds move by a learning rate per step at most: from elsewhere a short training would not get to k."""
        _, pre = self.sae.encode_with_hidden_pre(x)
        kept = round(self.config.k * len(x))
        self.sae.threshold.fill_(float(pre.flatten().topk(kept, sorted=True).values[-1]))

    def activation(self) -> Activation:
        return JumpRelu(self.sae.threshold.detach().clamp(min=0) * self.sae.W_dec.detach().norm(dim=-1))


def _dense_loss(
    sae: TrainingSAE[Any], x: Tensor, step: int, dead: Tensor, coefficients: dict[str, float]
) -> tuple[Tensor, Tensor]:
    step_input = TrainStepInput(
        sae_in=x, coefficients=coefficients, dead_neuron_mask=dead, n_training_steps=step, is_logging_step=False
    )
    output = sae.training_forward_pass(step_input)
    return output.loss, (output.feature_acts > 0).any(dim=0)
