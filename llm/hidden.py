"""Activations of the residual stream after one block, batch by batch, with nothing computed beyond that block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwater.core.errors import ConfigError
from headwater.llm.batching import common_prefix, length_batches
from headwater.llm.chat import UnfitChatError

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from headwater.llm.chat import ChatFormat, EncodedChat
    from headwater.llm.types import Message

_WINDOW_ROWS = 2048
"""Conversations tokenised and sorted by length at a time: bounds memory, and long enough for full buckets."""


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """Activations of a few conversations, without the tokens that all conversations begin with."""

    rows: list[int]
    """Index into the conversations, one per batch row. Over all batches every conversation occurs exactly once."""
    hidden: Tensor
    """(batch, seq, d_model): the output of the block, in the model's dtype, on the model's device."""
    own: Tensor
    """(batch, seq), bool: true on the row's own tokens. All false for a conversation without any: report it."""
    token_ids: Tensor
    """(batch, seq), int64; padding holds 0."""
    positions: Tensor
    """(batch, seq), int64: 0 for the row's first own token, 1 for the second; −1 where `own` is false."""


class _Reached(Exception):  # noqa: N818 - carries a result, not a fault
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def stream_hidden(
    model: PreTrainedModel,
    chat_format: ChatFormat,
    conversations: Sequence[Sequence[Message]],
    layer: int,
    *,
    roles: Sequence[str],
    max_tokens: int,
    max_batch_tokens: int,
) -> Iterator[HiddenBatch]:
    """Yield activations of block `layer` (0-based), shortest rows first within windows of some thousand rows.

    Raises `ConfigError` when the model has no such block, `UnfitChatError` for a conversation that is longer than the
    context or that the template refuses.
    """
    block = decoder_block(model, layer)
    for start in range(0, len(conversations), _WINDOW_ROWS):
        window = conversations[start : start + _WINDOW_ROWS]
        chats = chat_format.encode(window, roles=roles, max_tokens=max_tokens, first=start)
        _check_context(model, chats, start)
        full = [i for i, chat in enumerate(chats) if chat.token_ids]
        empty = [start + i for i, chat in enumerate(chats) if not chat.token_ids]
        prefix = shared_prefix([chats[i] for i in full])
        past = prefix_states(model, block, chats[full[0]].token_ids[:prefix], layer) if prefix else None
        skip = prefix if past is not None else 0
        for members in length_batches([len(chats[i].token_ids) - skip for i in full], max_batch_tokens):
            picked = [full[m] for m in members]
            chosen = [chats[i] for i in picked]
            yield _forward(model, block, chosen, skip=skip, past=past, rows=[start + i for i in picked])
        if empty:
            yield _nothing_own(model, empty)


def decoder_block(model: PreTrainedModel, layer: int) -> nn.Module:
    """Block `layer` of the decoder, found as the list that is as long as the model says it is deep."""
    depth = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if not 0 <= layer < depth:
        raise ConfigError(f"There is no layer {layer}: the model has {depth} blocks.", todo=f"Use 0 to {depth - 1}.")
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module[layer]
    raise ConfigError(
        f"The blocks of {type(model).__name__} could not be found.", todo="Use a decoder-only model of transformers."
    )


def run_to_block(model: PreTrainedModel, block: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The output of `block`, (batch, seq, d_model), with the forward pass stopped there."""

    def stop(_module: nn.Module, _args: object, output: Any) -> None:
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    handle = block.register_forward_hook(stop)
    try:
        # Not inference mode: its tensors can't take part in the training of an SAE.
        with torch.no_grad():
            model.base_model(**inputs)
    except _Reached as reached:
        return reached.hidden
    finally:
        handle.remove()
    raise ConfigError(f"{type(model).__name__} did not run the block it has.", todo="Use a decoder-only model.")


def _check_context(model: PreTrainedModel, chats: Sequence[EncodedChat], start: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for i, chat in enumerate(chats):
        if limit is not None and len(chat.token_ids) > limit:
            raise UnfitChatError(
                start + i,
                f" has {len(chat.token_ids)} tokens; the model's context holds {limit}.",
                todo="Lower max_tokens, or shorten the messages before the row's own.",
            )


def shared_prefix(chats: Sequence[EncodedChat]) -> int:
    """Leading tokens that all chats share and none owns; 0 when there is nothing to save."""
    if len(chats) < 2:
        return 0
    return min(common_prefix([chat.token_ids for chat in chats]), *(chat.own.index(True) for chat in chats))


def prefix_states(
    model: PreTrainedModel, block: nn.Module, prefix: list[int], layer: int
) -> list[tuple[Tensor, Tensor]] | None:
    """Keys and values, (1, heads, prefix, head_dim), of the shared prefix per block; None for other kinds of state.

    Attention to cached keys is the same sum as attention to recomputed ones; a recurrent or sliding state is not worth
    the special case.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prefix], device=model.device)
    run_to_block(model, block, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
    states = cache.layers[: layer + 1]
    if len(states) <= layer or any(type(state) is not DynamicLayer for state in states):
        return None
    return [(state.keys, state.values) for state in states]


def with_prefix(past: Sequence[tuple[Tensor, Tensor]], batch: int) -> DynamicCache:
    """The prefix's states as the beginning of `batch` rows; made anew for every forward pass, which adds to it."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache([(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in past])


def _forward(
    model: PreTrainedModel,
    block: nn.Module,
    chats: Sequence[EncodedChat],
    *,
    skip: int,
    past: Sequence[tuple[Tensor, Tensor]] | None,
    rows: list[int],
) -> HiddenBatch:
    """Padding stands on the right, where causal attention never looks at it, so no padding mask is needed."""
    ids = _padded([chat.token_ids[skip:] for chat in chats], model.device)
    own = _padded([chat.own[skip:] for chat in chats], model.device).bool()
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": past is not None}
    if past is not None:
        inputs["past_key_values"] = with_prefix(past, len(rows))
    hidden = run_to_block(model, block, inputs)
    return HiddenBatch(rows, hidden, own, ids, torch.where(own, own.cumsum(1) - 1, -1))


def _nothing_own(model: PreTrainedModel, rows: list[int]) -> HiddenBatch:
    shape = (len(rows), 1)
    zeros = torch.zeros(shape, dtype=torch.long, device=model.device)
    width = int(model.config.get_text_config(decoder=True).hidden_size)
    hidden = torch.zeros((*shape, width), dtype=model.dtype, device=model.device)
    return HiddenBatch(rows, hidden, zeros.bool(), zeros, zeros - 1)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long, device=device)
