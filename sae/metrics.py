"""How good a feature space is: explained variance, sparsity, dead features, and what patching it in costs the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.errors import ConfigError
from headwater.llm.batching import length_batches
from headwater.llm.hidden import decoder_block, prefix_states, shared_prefix, with_prefix
from headwater.llm.score import chosen_logprobs
from headwater.sae.space import FeatureSpace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headwater.llm.transformers import TransformersEngine
    from headwater.llm.types import Message

_BATCH_TOKENS = 1024
"""Tokens per forward pass."""


@dataclass(frozen=True, slots=True)
class SpaceQuality:
    """Measured on tokens that the SAE wasn't trained on, unless a name says otherwise."""

    tokens: int
    explained_variance: float
    """1 - E|x - x̂|² / (E|x|² - |E x|²): 1 is perfect, 0 no better than the mean activation."""
    l0: float
    """Mean number of features that a token fires."""
    dead_share: float
    """Share of the features that fire on none of the tokens."""


@torch.no_grad()
def measure_space(space: FeatureSpace, tokens: NDArray[np.float32] | torch.Tensor) -> SpaceQuality:
    """Measure `space` on activations (tokens, d_model), in blocks, with sums in float64.

    Raises ConfigError when there are no tokens or they are all the same, which leaves no variance to explain.
    """
    n_tokens = len(tokens)
    error = square = 0.0
    total = torch.zeros(space.d_model, dtype=torch.float64)
    fired = torch.zeros(space.width, dtype=torch.int64)
    for block in space.blocks(n_tokens):
        x = torch.as_tensor(np.ascontiguousarray(tokens[block]), device=space.w_enc.device)
        values = space.encode(x)
        error += float((x - space.decode(values)).double().square().sum())
        square += float(x.double().square().sum())
        total += x.double().sum(dim=0).cpu()
        fired += (values > 0).sum(dim=0).cpu()
    variance = square / n_tokens - float((total / n_tokens).square().sum()) if n_tokens else 0.0
    if variance <= 0:
        raise ConfigError(f"{n_tokens} tokens without variance can't measure an SAE.", todo="Give more texts.")
    return SpaceQuality(
        tokens=n_tokens,
        explained_variance=1 - error / n_tokens / variance,
        l0=float(fired.sum()) / n_tokens,
        dead_share=float((fired == 0).double().mean()),
    )


@dataclass(frozen=True, slots=True)
class LossRecovered:
    """What the model's prediction loses when its activations go through the SAE; cross-entropies in nats per token."""

    tokens: int
    """Own tokens that were predicted from own tokens: the only predictions that count."""
    ce_clean: float
    ce_sae: float
    """With the reconstructions in place of the activations."""
    ce_ablated: float
    """With zeros in place of the activations."""

    @property
    def recovered(self) -> float | None:
        """(CE_ablated - CE_sae) / (CE_ablated - CE_clean): 1 is perfect, 0 no better than zeros.

        None when ablation doesn't hurt, which leaves nothing to recover.
        """
        lost = self.ce_ablated - self.ce_clean
        return (self.ce_ablated - self.ce_sae) / lost if lost > 0 else None


@torch.no_grad()
def loss_recovered(
    engine: TransformersEngine,
    conversations: Sequence[Sequence[Message]],
    space: FeatureSpace,
    *,
    max_tokens: int = 512,
    roles: Sequence[str] = ("user",),
) -> LossRecovered:
    """Run `conversations` three times, the output of block `space.layer` as it is, reconstructed, and zeroed.

    Only own tokens are patched: the SAE neither saw nor will measure the template's, whose activations are unlike any
    text's and would dominate the result. Raises ConfigError when no own token follows another.
    """
    model = engine.model
    chats = [chat for chat in engine.chat_format.encode(conversations, roles=roles, max_tokens=max_tokens) if chat.own]
    space = space.to(model.device)
    # Nobody's own tokens come first, and what precedes a patch doesn't feel it: one pass serves all rows and patches.
    depth = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    prefix = shared_prefix(chats)
    last = decoder_block(model, depth - 1)
    past = prefix_states(model, last, chats[0].token_ids[:prefix], depth - 1) if prefix else None
    skip = prefix if past is not None else 0
    block = decoder_block(model, space.layer)
    patches = (None, space.reconstruct, torch.zeros_like)
    sums, count = [0.0] * len(patches), 0
    for members in length_batches([len(chat.token_ids) - skip for chat in chats], _BATCH_TOKENS):
        ids = _padded([chats[member].token_ids[skip:] for member in members]).to(model.device)
        own = _padded([chats[member].own[skip:] for member in members]).to(model.device).bool()
        counted = own[:, 1:] & own[:, :-1]
        count += int(counted.sum())
        for number, patch in enumerate(patches):
            inputs: dict[str, Any] = {"input_ids": ids, "use_cache": past is not None}
            if past is not None:
                inputs["past_key_values"] = with_prefix(past, len(members))
            with _patched(block, own, patch):
                hidden = model.base_model(**inputs).last_hidden_state[:, :-1][counted]
            sums[number] -= float(chosen_logprobs(model, hidden, ids[:, 1:][counted]).double().sum())
    if not count:
        raise ConfigError(
            "No text has two own tokens in a row, so there is no prediction to measure.", todo="Give longer texts."
        )
    return LossRecovered(count, *(total / count for total in sums))


@contextmanager
def _patched(block: nn.Module, own: Tensor, patch: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """While it lasts, `block`'s output at own tokens goes through `patch`."""

    def replace(_module: nn.Module, _args: object, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if patch is not None:
            hidden = hidden.clone()
            hidden[own] = patch(hidden[own].float()).to(hidden.dtype)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = block.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Padding stands on the right, where causal attention never looks at it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long)
