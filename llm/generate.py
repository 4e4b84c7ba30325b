"""Answering many chats at once: rows join and leave the batch while it is being decoded."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from headwater.core.errors import BadOutput, HeadwaterError, PermanentError
from headwater.llm.batching import common_prefix, length_batches
from headwater.llm.kv import SlotCache, check_past, right_aligned
from headwater.llm.replies import cut_at_stop, judge_reply
from headwater.llm.sampling import draw_tokens
from headwater.llm.types import ChatOutcome, ChatRequest, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headwater.llm.chat import ChatFormat

_SPARE_COLUMNS = 32
"""Tokens decoded before the past is compacted: rare enough to cost little, often enough to keep attention short."""
_SHRINK_BELOW = 0.75
"""Share of rows at work below which the batch is made smaller, when no row is waiting."""
_REFILL_SHARE = 0.125
"""Share of free places at which waiting rows join: each joining costs one pass over their prompts."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt decoded before a reply: some tokenizers write a word's space only after another word."""


@dataclass(slots=True)
class _Row:
    request: ChatRequest
    prompt: list[int]
    draws: random.Random
    order: int
    new: list[int] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]

    @property
    def past(self) -> list[int]:
        """The tokens whose keys and values must be there before the next step: all but the newest."""
        return self.prompt[:-1]


class Generator:
    """Decodes one call's requests; iterate `run` to the end, or stop between two of its steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        chat_format: ChatFormat,
        *,
        max_rows: int,
        max_cache_tokens: int,
        max_batch_tokens: int,
        stopped: Callable[[], bool],
    ) -> None:
        check_past(model)
        self._model = model
        self._format = chat_format
        self._tokenizer: PreTrainedTokenizerBase = chat_format.tokenizer
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._max_batch_tokens = max_batch_tokens
        self._stopped = stopped
        self._ends = _end_tokens(model, self._tokenizer)
        self._rows: list[_Row | None] = []
        self._cache: SlotCache | None = None
        self._prefix: list[int] = []
        self._prefix_states: list[tuple[Tensor, Tensor]] = []

    def run(self, requests: Sequence[ChatRequest]) -> Iterator[list[ChatOutcome]]:
        """Outcomes in groups, as rows finish. The order of work depends on the requests alone."""
        rows, refused = self._prepared(requests)
        if refused:
            yield refused
        if not rows:
            return
        self._compute_prefix(rows)
        longest = max(len(row.prompt) + row.request.sampling.max_tokens for row in rows)
        places = max(1, min(self._max_rows, self._max_cache_tokens // longest, len(rows)))
        # Longest first: a row that joins later is never longer than those at work, so it fits the columns in use.
        # Rows with one prompt stand together, so that they join together.
        waiting = deque(sorted(rows, key=lambda row: (-len(row.prompt), row.prompt, row.order)))
        while (waiting or self._working) and not self._stopped():
            self._make_up_batch(waiting, places)
            if finished := self._step():
                yield finished

    @property
    def _working(self) -> int:
        return sum(row is not None for row in self._rows)

    def _prepared(self, requests: Sequence[ChatRequest]) -> tuple[list[_Row], list[ChatOutcome]]:
        rows: list[_Row] = []
        refused: list[ChatOutcome] = []
        for order, request in enumerate(requests):
            try:
                prompt = self._prompt(request)
            except HeadwaterError as error:
                refused.append(ChatOutcome(request.id, error))
            else:
                rows.append(_Row(request, prompt, random.Random(request.seed), order))
        return rows, refused

    def _prompt(self, request: ChatRequest) -> list[int]:
        text = self._format.prompt(request.messages)
        prompt: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(prompt) < 2:
            raise PermanentError(f"The chat template renders request {request.id} to fewer than two tokens.")
        limit = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        wanted = len(prompt) + request.sampling.max_tokens
        if limit is not None and wanted > limit:
            raise BadOutput(
                f"Request {request.id} needs {wanted} tokens; the model's context holds {limit}.",
                reason="prompt_too_long",
                todo="Shorten its messages or lower max_tokens.",
            )
        return prompt

    @torch.inference_mode()
    def _compute_prefix(self, rows: Sequence[_Row]) -> None:
        shared = common_prefix([row.past for row in rows]) if len(rows) > 1 else 0
        self._prefix = rows[0].prompt[:shared]
        if shared:
            cache = DynamicCache()
            ids = torch.tensor([self._prefix], device=self._model.device)
            self._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            self._prefix_states = [(layer.keys, layer.values) for layer in cache.layers]

    @torch.inference_mode()
    def _make_up_batch(self, waiting: deque[_Row], places: int) -> None:
        free = places - self._working
        if waiting and free >= max(1, round(places * _REFILL_SHARE)):
            self._admit([waiting.popleft() for _ in range(min(free, len(waiting)))], places)
        assert self._cache is not None
        shrunk = not waiting and self._working <= _SHRINK_BELOW * len(self._rows)
        if self._cache.room < 1 or shrunk:
            keep = [slot for slot, row in enumerate(self._rows) if row is not None or waiting]
            self._cache = self._cache.compacted(keep, _SPARE_COLUMNS)
            self._rows = [self._rows[slot] for slot in keep]

    def _admit(self, rows: Sequence[_Row], places: int) -> None:
        """Compute the past of new rows and give them free places. Rows with one prompt share its computation."""
        same: dict[tuple[int, ...], list[_Row]] = {}
        for row in rows:
            same.setdefault(tuple(row.past), []).append(row)
        pasts = list(same)
        suffixes = [len(past) - len(self._prefix) for past in pasts]
        for members in reversed(length_batches(suffixes, self._max_batch_tokens)):
            distinct = [pasts[m] for m in members]
            states = self._past_of(distinct)
            if self._cache is None:
                self._rows = [None] * places
                self._cache = SlotCache.empty(states, places, spare=_SPARE_COLUMNS)
            group = [(index, row) for index, past in enumerate(distinct) for row in same[past]]
            slots = [slot for slot, row in enumerate(self._rows) if row is None][: len(group)]
            self._cache.put(slots, states, [index for index, _ in group], [len(row.past) for _, row in group])
            for slot, (_, row) in zip(slots, group, strict=True):
                self._rows[slot] = row

    def _past_of(self, pasts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Right-aligned keys and values per block, (pasts, heads, longest past, head_dim)."""
        shared = [(k.expand(len(pasts), -1, -1, -1), v.expand(len(pasts), -1, -1, -1)) for k, v in self._prefix_states]
        suffixes = [past[len(self._prefix) :] for past in pasts]
        longest = max(map(len, suffixes))
        if longest == 0:
            return shared
        cache = DynamicCache(shared)
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in suffixes], device=self._model.device)
        self._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        return right_aligned(cache, [len(past) for past in pasts])

    @torch.inference_mode()
    def _step(self) -> list[ChatOutcome]:
        """Draw one token for every row and return the outcomes of the rows that ended with it."""
        assert self._cache is not None
        device = self._model.device
        newest = [row.newest if row else 0 for row in self._rows]
        logits = self._model(
            input_ids=torch.tensor(newest, device=device).unsqueeze(-1),
            attention_mask=self._cache.mask(device),
            position_ids=torch.tensor(self._cache.lengths, device=device).unsqueeze(-1),
            past_key_values=self._cache.past(),
            use_cache=True,
        ).logits[:, -1]
        self._cache.grew()
        working = [slot for slot, row in enumerate(self._rows) if row is not None]
        drawn = self._draw(logits[working].float(), [row for row in self._rows if row is not None])
        finished: list[ChatOutcome] = []
        for slot, token in zip(working, drawn, strict=True):
            row = self._rows[slot]
            if row is not None and (outcome := self._extended(row, token)):
                finished.append(outcome)
                self._rows[slot] = None
                self._cache.clear(slot)
        return finished

    def _draw(self, logits: Tensor, rows: Sequence[_Row]) -> list[int]:
        if torch.isnan(logits.sum()):
            raise PermanentError(
                "The model's logits are not numbers.", todo="Use dtype bfloat16 or float32; float16 overflows."
            )
        tokens: list[int] = draw_tokens(
            logits,
            [row.request.sampling.temperature for row in rows],
            [row.request.sampling.top_p for row in rows],
            [row.draws.random() for row in rows],
        ).tolist()
        return tokens

    def _extended(self, row: _Row, token: int) -> ChatOutcome | None:
        """Add a token to a row; its outcome when that ended it."""
        ended = token in self._ends
        if not ended:
            row.new.append(token)
        sampling = row.request.sampling
        text = None
        if ended or len(row.new) >= sampling.max_tokens or self._may_hold_stop(row):
            text, stopped = cut_at_stop(self._text(row), sampling.stop)
            ended = ended or stopped
        if text is None or not (ended or len(row.new) >= sampling.max_tokens):
            return None
        usage = Usage(len(row.prompt), len(self._prefix), len(row.new) + (token in self._ends))
        return ChatOutcome(row.request.id, judge_reply(row.request, text, usage, ended=ended))

    def _may_hold_stop(self, row: _Row) -> bool:
        """Whether a stop text ends in the newest token. A token is at least a byte, so a short tail suffices."""
        stops = row.request.sampling.stop
        if not stops:
            return False
        tail = self._decode(row.new[-(max(len(stop.encode()) for stop in stops) + _CONTEXT_TOKENS) :])
        return any(stop in tail for stop in stops)

    def _text(self, row: _Row) -> str:
        """The new text alone, decoded behind the end of the prompt."""
        before = row.prompt[-_CONTEXT_TOKENS:]
        context, whole = self._decode(before), self._decode([*before, *row.new])
        return whole[len(context) :] if whole.startswith(context) else self._decode(row.new)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None)
