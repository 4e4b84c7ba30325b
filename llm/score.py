"""Per-token log-probabilities of texts, without ever holding float32 log-probabilities of a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.llm.batching import length_batches
from headwater.llm.types import TokenScores

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WINDOW_TEXTS = 512
"""Texts tokenised and sorted by length at a time; scores of a window are held until its longest text is done."""
_CHUNK_LOGITS = 1 << 25
"""Logits computed at a time (128 MiB of float32): batch tokens × vocabulary would be gigabytes."""


def score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_batch_tokens: int,
) -> Iterator[TokenScores]:
    """Scores of raw texts, in order: ln p(token | the text's earlier tokens); NaN for the first token.

    Raises `ConfigError` naming a text that is longer than the model's context.
    """
    for start in range(0, len(texts), _WINDOW_TEXTS):
        window = list(texts[start : start + _WINDOW_TEXTS])
        rows: list[list[int]] = tokenizer(window, add_special_tokens=False, verbose=False)["input_ids"]
        _check_context(model, rows, start)
        scores = [np.full(len(row), np.nan, dtype=np.float32) for row in rows]
        scored = [i for i, row in enumerate(rows) if len(row) > 1]
        for members in length_batches([len(rows[i]) for i in scored], max_batch_tokens):
            picked = [scored[m] for m in members]
            for i, values in zip(picked, _batch(model, [rows[i] for i in picked]), strict=True):
                scores[i][1:] = values
        for row, values in zip(rows, scores, strict=True):
            yield TokenScores(np.array(row, dtype=np.int64), values)


@torch.inference_mode()
def _batch(model: PreTrainedModel, rows: Sequence[list[int]]) -> list[NDArray[np.float32]]:
    """Log-probabilities of every token but the first, one array per row."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    real = torch.arange(1, longest, device=ids.device) < torch.tensor([[len(row)] for row in rows], device=ids.device)
    values = chosen_logprobs(model, hidden[:, :-1][real], ids[:, 1:][real])
    parts: Sequence[Tensor] = values.cpu().split([len(row) - 1 for row in rows])  # type: ignore[no-untyped-call]
    return [part.numpy() for part in parts]


def chosen_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """(tokens,) float32 from hidden states (tokens, d_model), some tokens at a time."""
    head = model.get_output_embeddings()
    size = max(1, _CHUNK_LOGITS // int(model.config.get_text_config(decoder=True).vocab_size))
    parts = []
    for start in range(0, len(targets), size):
        logits = _adjusted(model, head(hidden[start : start + size]).float())
        wanted = targets[start : start + size].unsqueeze(-1)
        parts.append(logits.gather(-1, wanted).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(parts)


def _adjusted(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What some models do to logits behind their head: scale them (Cohere, Granite) or squash them (Gemma 2)."""
    config = model.config.get_text_config(decoder=True)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def _check_context(model: PreTrainedModel, rows: Sequence[Sequence[int]], start: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for i, row in enumerate(rows):
        if limit is not None and len(row) > limit:
            raise ConfigError(
                f"Text {start + i} has {len(row)} tokens; the model's context holds {limit}.",
                todo="Cut the text or leave it out.",
            )
