"""How to train an SAE: part of a recipe, hence free of torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headwater.core.settings import Settings


class SaeTrainConfig(Settings):
    """Settings of `train_space`. The defaults suit ten to twenty thousand tokens and a minute on two CPU cores."""

    architecture: Literal["topk", "batchtopk", "jumprelu"] = "topk"
    width: int = Field(2048, ge=2)
    """Number of features."""
    k: int = Field(32, ge=1)
    """Features active per token: exactly (topk), on average (batchtopk), or aimed at (jumprelu)."""
    k_start: int | None = Field(None, ge=1)
    """Where annealing of k begins; None trains with k throughout. topk and batchtopk only."""
    k_anneal_share: float = Field(0.5, gt=0, le=1)
    """Share of the steps over which k falls linearly from `k_start`."""
    steps: int = Field(300, ge=1)
    batch_tokens: int = Field(512, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises linearly from zero."""
    decay_share: float = Field(0.3, ge=0, le=1)
    """Share of the steps, at the end, over which the learning rate falls linearly to zero."""
    aux_coefficient: float = Field(1 / 8, ge=0)
    """Weight of the loss that lets dead features explain what the others leave over. topk and batchtopk only."""
    dead_after_steps: int = Field(30, ge=1)
    """A feature that didn't fire for so many steps counts as dead while training."""
    l0_coefficient: float = Field(1.0, ge=0)
    """Weight of jumprelu's penalty on missing k, reached linearly over the training."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the texts that are kept from training, for measuring."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.k >= self.width:
            raise ValueError(f"k {self.k} must be below width {self.width}")
        if self.k_start is not None and not self.k <= self.k_start <= self.width:
            raise ValueError(f"k_start {self.k_start} must lie between k {self.k} and width {self.width}")
        if self.k_start is not None and self.architecture == "jumprelu":
            raise ValueError("k_start has no meaning for jumprelu")
        if self.warmup_share + self.decay_share > 1:
            raise ValueError("warmup_share and decay_share together exceed 1")
        return self
