"""Keys and values of many rows that are decoded together and leave at different times.

Rows stand right-aligned in one block of columns: every row's newest token is in the same column, so one forward pass
extends all of them, and a finished row's place can be given to a new row whose past is shifted in from the left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "headwater_grouped"
"""Name under which the attention of this module is known to transformers."""


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One block's keys and values, (rows, heads, columns, head_dim), in memory laid out ahead.

    The layer of transformers copies everything for every new token.
    """

    def __init__(self, keys: Tensor, values: Tensor, spare: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.used = keys.shape[2]
        self._keys, self._values = (_with_room(states, spare) for states in (keys, values))

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        return self._keys[:, :, : self.used], self._values[:, :, : self.used]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.used + key_states.shape[2]
        self._keys[:, :, self.used : end] = key_states
        self._values[:, :, self.used : end] = value_states
        self.used = end
        return self.held

    def get_seq_length(self) -> int:
        return self.used

    def taken(self, rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` from column `start` on; the layer lets go of its memory."""
        keys, values = (states[rows, :, start:] for states in self.held)
        self._keys, self._values = self._keys.new_empty(0), self._values.new_empty(0)
        return keys, values

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the past of `slots` by keys and values that end in the newest column."""
        start = self.used - keys.shape[2]
        self._keys[slots, :, start : self.used] = keys
        self._values[slots, :, start : self.used] = values


class SlotCache:
    """The past of all rows: one `SlotLayer` per block and which columns are a row's own."""

    def __init__(self, states: Iterable[tuple[Tensor, Tensor]], lengths: Sequence[int], spare: int) -> None:
        """From right-aligned states per block, (rows, heads, columns, head_dim), and each row's number of tokens.

        The states are taken one block at a time: a whole cache is large, and two of them at once need not be.
        """
        self.layers = [SlotLayer(keys, values, spare) for keys, values in states]
        self.lengths = list(lengths)
        self.room = spare

    @classmethod
    def empty(cls, like: Sequence[tuple[Tensor, Tensor]], rows: int, *, spare: int) -> SlotCache:
        """Free places for `rows` rows, with as many columns as `like` has."""
        states = ((k.new_zeros((rows, *k.shape[1:])), v.new_zeros((rows, *v.shape[1:]))) for k, v in like)
        return cls(states, [0] * rows, spare)

    @property
    def columns(self) -> int:
        return self.layers[0].used

    def past(self) -> Cache:
        """The cache as transformers wants it."""
        return Cache(layers=list(self.layers))

    def mask(self, device: torch.device) -> Tensor:
        """(rows, columns + 1), int64: 1 where the coming token of a row may look; itself included."""
        columns = torch.arange(self.columns + 1, device=device)
        starts = self.columns - torch.tensor(self.lengths, device=device)
        return (columns >= starts.unsqueeze(-1)).long()

    def grew(self) -> None:
        """Count the token that a forward pass has just added to every row."""
        self.lengths = [length + 1 for length in self.lengths]
        self.room -= 1

    def put(
        self,
        slots: Sequence[int],
        states: Sequence[tuple[Tensor, Tensor]],
        which: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Give each of `slots` the state numbered `which`, right-aligned; none may exceed the columns in use."""
        device = states[0][0].device
        where, source = torch.tensor(slots, device=device), torch.tensor(which, device=device)
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.put(where, keys[source], values[source])
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = length

    def clear(self, slot: int) -> None:
        """Forget a row, so that its past keeps no columns alive."""
        self.lengths[slot] = 0

    def compacted(self, keep: Sequence[int], spare: int) -> SlotCache:
        """A cache of the rows `keep` alone, without the columns that none of them uses, and with room for `spare`.

        This one is empty afterwards: its blocks are freed one by one while the new ones are made.
        """
        lengths = [self.lengths[row] for row in keep]
        rows = torch.tensor(keep, device=self.layers[0].device)
        start = self.columns - max(lengths)
        return SlotCache((layer.taken(rows, start) for layer in self.layers), lengths, spare)


def right_aligned(cache: DynamicCache, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Per block keys and values of rows that start in the first column of `cache`, moved to end in the last one."""
    longest = max(lengths)
    first = cache.layers[0].keys
    shift = longest - torch.tensor(lengths, device=first.device)
    source = (torch.arange(longest, device=first.device) - shift.unsqueeze(-1)).clamp(min=0)
    index = source[:, None, :, None]
    return [
        (torch.take_along_dim(layer.keys, index, 2), torch.take_along_dim(layer.values, index, 2))
        for layer in cache.layers
    ]


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch `model` to an attention whose single-token step doesn't copy keys and values for every query head."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(ATTENTION, _grouped_attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)


def check_past(model: PreTrainedModel) -> None:
    """Raise `ConfigError` when the model's past is more than keys and values: rows of it cannot be batched here."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    if any(type(layer) not in kinds for layer in DynamicCache(config=model.config).layers):
        raise ConfigError(
            f"{type(model).__name__} keeps a recurrent state, which this engine cannot batch.",
            todo="Use the vllm engine, or an OpenAI-compatible server.",
        )


def _grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """With one new token, the query heads that share a key head are that head's queries: no copy is needed."""
    rows, heads, new, width = query.shape
    groups = key.shape[1]
    per_head_mask = attention_mask is not None and attention_mask.shape[1] != 1
    if new != 1 or groups == heads or per_head_mask or options.get("position_bias") is not None:
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return result
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, heads // groups, width),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _with_room(states: Tensor, spare: int) -> Tensor:
    rows, heads, columns, width = states.shape
    wide = states.new_zeros((rows, heads, columns + spare, width))
    wide[:, :, :columns] = states
    return wide
