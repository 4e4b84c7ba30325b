"""Chats as tokens: rendering through a model's own template, and knowing which tokens are a row's own.

Which part of a templated chat the row wrote is computed from the template itself: the chat is rendered once as it is
and once with the message replaced by a marker; what stands before and after the marker is the template's. This holds
for templates that trim, that inject a system prompt, or whose markers also occur in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headwater.llm.types import Message

_MARKER = "\ue0f0own\ue0f1"
"""Private-use characters, which no template looks at and no trimming touches."""
_FIXED_DATE = datetime(2024, 7, 26)
"""For templates that print today's date: a row must mean the same tomorrow. The fallback date of Llama 3's template."""


class UnfitChatError(ConfigError):
    """One of several conversations cannot be shown to the model. The engine knows its place; its caller, what it is."""

    def __init__(self, index: int, why: str, *, todo: str = "") -> None:
        super().__init__(f"Conversation {index}{why}", todo=todo)
        self.index = index
        """Its place among all the conversations that the engine was given."""
        self.why = why
        """What is wrong with it: the rest of a sentence about it, or after a colon a sentence."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A rendered conversation up to its last own token; what follows cannot influence an own token's activation."""

    token_ids: list[int]
    own: list[bool]
    """Same length: true where the token covers text of the row's own. Empty when the row has no own token."""


class ChatFormat:
    """A tokenizer with its chat template. Without a template, one user message stands for its plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"The tokenizer {type(tokenizer).__name__} cannot say which characters a token covers.",
                todo="Use a model with a tokenizer.json.",
            )
        self.tokenizer = tokenizer
        self._frames: dict[str, list[str]] = {}

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text a model continues: the chat with the opening of an assistant turn, or up to the end of a prefill.

        Raises `ConfigError` when the model has no chat template or the template refuses the roles.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError("The model has no chat template, so it cannot chat.", todo="Use an instruct model.")
        if messages and messages[-1].role == "assistant":
            opening = self._pieces(messages, len(messages) - 1)[0]
            return opening + messages[-1].content
        return self._render(messages, add_generation_prompt=True)

    def encode(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        roles: Sequence[str] = ("user",),
        max_tokens: int,
        first: int = 0,
    ) -> list[EncodedChat]:
        """Tokens of each conversation with its own ones marked: those covering content of messages in `roles`.

        A token that straddles the border of template and content is own. Own tokens beyond the first `max_tokens` are
        cut off. Raises `UnfitChatError` for a conversation that the template refuses, counted from `first`: the place
        of these conversations among all there are.
        """
        rendered = [self._spans(index, chat, roles) for index, chat in enumerate(conversations, first)]
        if not rendered:
            return []
        encoded = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=self.tokenizer.chat_template is None,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            _cut(ids, _own(offsets, spans), max_tokens)
            for ids, offsets, (_, spans) in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        ]

    def _spans(
        self, index: int, messages: Sequence[Message], roles: Sequence[str]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and the character ranges [start, end) that messages in `roles` wrote."""
        try:
            text = self._render(messages)
            spans = [
                span
                for i, message in enumerate(messages)
                if message.role in roles and message.content.strip()
                for span in self._locate(text, messages, i)
            ]
        except ConfigError as error:
            raise UnfitChatError(index, f": {error.what}", todo=error.todo) from error
        return text, spans

    def _locate(self, text: str, messages: Sequence[Message], i: int) -> list[tuple[int, int]]:
        pieces = self._pieces(messages, i)
        shown = len(pieces) - 1
        length, rest = divmod(len(text) - sum(map(len, pieces)), shown) if shown else (0, 0)
        spans, at = [], 0
        for piece in pieces[:-1]:
            at += len(piece)
            spans.append((at, at + length))
            at += length
        fits = rest == 0 and length >= 0 and _joined(text, pieces, spans)
        return spans if fits else _search(text, messages[i].content)

    def _pieces(self, messages: Sequence[Message], i: int) -> list[str]:
        """What the template puts around message `i`: one piece more than the number of times it shows the message."""
        if len(messages) == 1 and messages[0].role in self._frames:
            return self._frames[messages[0].role]
        marker = _MARKER
        while any(marker in message.content for message in messages):
            marker += "\ue0f2"
        marked = [(m.role, marker if j == i else m.content) for j, m in enumerate(messages)]
        pieces = self._render_pairs(marked, add_generation_prompt=False).split(marker)
        if len(messages) == 1:
            self._frames[messages[0].role] = pieces
        return pieces

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self._render_pairs([(m.role, m.content) for m in messages], add_generation_prompt=add_generation_prompt)

    def _render_pairs(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None:
            if len(messages) != 1 or messages[0][0] != "user":
                raise ConfigError(
                    "The model has no chat template, so only a single user message can be shown to it.",
                    todo="Use an instruct model, or rows of plain text.",
                )
            return messages[0][1]
        import jinja2

        fixed: dict[str, Any] = {"strftime_now": _FIXED_DATE.strftime}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": role, "content": content} for role, content in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **fixed,
                )
            )
        except jinja2.TemplateError as error:
            order = ", ".join(role for role, _ in messages)
            raise ConfigError(
                f"The model's chat template refuses a chat of the roles {order}: {error}.",
                todo="Change the messages, or use a model whose template allows them.",
            ) from error


def _joined(text: str, pieces: Sequence[str], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether `text` is the pieces with the same content in each gap."""
    contents = {text[start:end] for start, end in spans}
    return len(contents) <= 1 and text == (contents.pop() if contents else "").join(pieces)


def _search(text: str, content: str) -> list[tuple[int, int]]:
    """For a template that chooses its own text by the content: the one place where the content stands."""
    needle = content.strip()
    if text.count(needle) == 1:
        start = text.index(needle)
        return [(start, start + len(needle))]
    if needle not in text:
        return []
    raise ConfigError(
        "The model's chat template changes its own text with the content, and the content occurs in it more than once, "
        "so the row's own tokens cannot be told apart.",
        todo="Use another chat template, or leave the row out.",
    )


def _own(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens overlap a span. A token of spaces whose range the tokenizer trimmed to nothing counts as a point."""
    own = [False] * len(offsets)
    for low, high in spans:
        for t, (start, end) in enumerate(offsets):
            if (start < high and end > low) if start < end else low < end <= high:
                own[t] = True
    return own


def _cut(token_ids: list[int], own: list[bool], max_tokens: int) -> EncodedChat:
    places = [t for t, mine in enumerate(own) if mine][:max_tokens]
    end = places[-1] + 1 if places else 0
    return EncodedChat(token_ids[:end], own[:end])
