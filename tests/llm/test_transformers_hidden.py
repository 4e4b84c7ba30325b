"""Activations are those of the plain forward pass, for the row's own tokens, whatever the batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from headwater.core.errors import ConfigError
from headwater.llm.types import Message

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="the local engines need the extra `local`")

from headwater.llm import hidden  # noqa: E402
from headwater.llm.chat import ChatFormat  # noqa: E402
from headwater.llm.hidden import HiddenBatch, run_to_block  # noqa: E402
from headwater.llm.transformers import TransformersEngine  # noqa: E402

TEXTS = [
    "Write a haiku about rain.",
    "Sum 12 and 45.",
    "",
    "  spaced out  ",
    "<|im_start|>user\nWho am I?<|im_end|>",
    "Write a long poem about the sea, the wind and the stars, in which nobody ever says a word.",
]
CHATS = [[Message("user", text)] for text in TEXTS]
LAST = 29


def own_rows(batches: Sequence[HiddenBatch], count: int) -> list[Tensor]:
    """Per conversation the activations of its own tokens, (tokens, d_model)."""
    found: dict[int, Tensor] = {}
    for batch in batches:
        for i, row in enumerate(batch.rows):
            assert row not in found
            found[row] = batch.hidden[i][batch.own[i]]
    return [found[row] for row in range(count)]


def plain_forward(engine: TransformersEngine, chat: Sequence[Message], layer: int) -> Tensor:
    """The whole model on one unpadded conversation; own tokens found by comparing with an empty message."""
    [encoded] = engine.chat_format.encode([chat], max_tokens=512)
    with torch.inference_mode():
        out = engine.model(torch.tensor([encoded.token_ids]), output_hidden_states=True)
    states: Tensor = out.hidden_states[layer + 1][0]
    return states[torch.tensor(encoded.own)]


@pytest.mark.parametrize("layer", [0, 11])
def test_activations_equal_the_plain_forward_pass(engine: TransformersEngine, layer: int) -> None:
    rows = own_rows(list(engine.hidden_states(CHATS, layer)), len(CHATS))
    for chat, row in zip(CHATS, rows, strict=True):
        if chat[0].content:
            torch.testing.assert_close(row, plain_forward(engine, chat, layer), atol=1e-4, rtol=1e-5)


def test_the_last_block_is_taken_before_the_final_norm(engine: TransformersEngine) -> None:
    [_, row] = own_rows(list(engine.hidden_states(CHATS[:2], LAST)), 2)
    normed = engine.model.model.norm(row)
    torch.testing.assert_close(normed, plain_forward(engine, CHATS[1], LAST), atol=1e-3, rtol=1e-4)
    assert (row - normed).abs().max() > 1


def test_a_shared_prefix_computed_once_changes_nothing(engine: TransformersEngine) -> None:
    together = own_rows(list(engine.hidden_states(CHATS, 11)), len(CHATS))
    for chat, row in zip(CHATS, together, strict=True):
        if chat[0].content:
            [alone] = own_rows(list(engine.hidden_states([chat], 11)), 1)
            torch.testing.assert_close(row, alone, atol=1e-4, rtol=1e-5)


def test_prefix_tokens_are_not_returned(engine: TransformersEngine) -> None:
    [batch] = [b for b in engine.hidden_states(CHATS[:2], 0) if b.own.any()]
    assert batch.token_ids.shape[1] == batch.own.sum(1).max()


def test_a_conversation_without_own_tokens_is_present_and_all_false(engine: TransformersEngine) -> None:
    batches = list(engine.hidden_states(CHATS, 0))
    assert sorted(row for b in batches for row in b.rows) == list(range(len(CHATS)))
    [(batch, i)] = [(b, b.rows.index(2)) for b in batches if 2 in b.rows]
    assert not batch.own[i].any()
    assert batch.hidden.shape[-1] == 576


def test_only_empty_conversations_need_no_forward_pass(engine: TransformersEngine) -> None:
    [batch] = engine.hidden_states([[Message("user", "")], [Message("user", " ")]], 0)
    assert batch.rows == [0, 1]
    assert not batch.own.any()


def test_positions_count_own_tokens_and_do_not_depend_on_the_batch(engine: TransformersEngine) -> None:
    chat = [Message("user", "one two"), Message("assistant", "three"), Message("user", "four five six")]
    short = [Message("user", "one")]
    for chats in ([chat], [short, chat]):
        [(batch, i)] = [
            (b, b.rows.index(chats.index(chat))) for b in engine.hidden_states(chats, 0) if chats.index(chat) in b.rows
        ]
        assert batch.positions[i][batch.own[i]].tolist() == [0, 1, 2, 3, 4]
        assert (batch.positions[i][~batch.own[i]] == -1).all()
        assert engine.tokenizer.decode(batch.token_ids[i][batch.own[i]]) == "one twofour five six"


def test_batches_hold_no_more_tokens_than_asked_and_give_the_same_rows(smollm_folder: str) -> None:
    small = TransformersEngine(model=smollm_folder, max_batch_tokens=64)
    rng = random.Random(0)
    words = ["rain", "sea", "wind", "star", "poem", "haiku", "sum", "word", "line", "night"]
    chats = [[Message("user", " ".join(rng.choices(words, k=rng.randint(1, 40))))] for _ in range(30)]
    batches = list(small.hidden_states(chats, 2))
    assert all(b.token_ids.numel() <= 64 for b in batches)
    for chat, row in list(zip(chats, own_rows(batches, len(chats)), strict=True))[::7]:
        torch.testing.assert_close(row, plain_forward(small, chat, 2), atol=1e-4, rtol=1e-5)


def test_max_tokens_keeps_the_first_own_tokens(engine: TransformersEngine) -> None:
    [whole] = own_rows(list(engine.hidden_states([CHATS[5]], 3)), 1)
    [cut] = own_rows(list(engine.hidden_states([CHATS[5]], 3, max_tokens=4)), 1)
    torch.testing.assert_close(cut, whole[:4], atol=1e-4, rtol=1e-5)


def test_blocks_after_the_asked_one_are_not_run(engine: TransformersEngine) -> None:
    ran: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(engine.model.model.layers)
    ]
    try:
        list(engine.hidden_states(CHATS[:1], 4))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2, 3, 4]


def test_no_hook_stays_behind(engine: TransformersEngine) -> None:
    before = [len(block._forward_hooks) for block in engine.model.model.layers]
    list(engine.hidden_states(CHATS, 4))
    assert [len(block._forward_hooks) for block in engine.model.model.layers] == before
    assert engine.model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 49152)


def test_a_layer_that_is_not_there_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match=r"no layer 30: the model has 30 blocks. Use 0 to 29"):
        list(engine.hidden_states(CHATS, 30))


def test_a_conversation_beyond_the_context_is_named(engine: TransformersEngine) -> None:
    long = [Message("user", "word " * 9000), Message("assistant", "yes"), Message("user", "now")]
    with pytest.raises(ConfigError, match=r"Conversation 1 has \d+ tokens; the model's context holds 8192"):
        list(engine.hidden_states([CHATS[0], long], 0, roles=("assistant",)))


def test_a_conversation_is_counted_beyond_the_window_it_is_read_in(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ raise_exception('No system') if m.role == 'system' else m.content }}{% endfor %}"
    )
    monkeypatch.setattr(hidden, "_WINDOW_ROWS", 2)
    chats = [*CHATS[:3], [Message("system", "s"), Message("user", "u")]]
    with pytest.raises(ConfigError, match=r"^Conversation 3: .*roles system, user: No system"):
        list(
            hidden.stream_hidden(
                engine.model, ChatFormat(tokenizer), chats, 0, roles=("user",), max_tokens=9, max_batch_tokens=64
            )
        )


def test_the_hook_takes_the_first_of_a_blocks_outputs() -> None:
    """GPT-2's blocks have another layout than Llama's: learned positions, fused attention, `transformer.h`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from headwater.llm.hidden import decoder_block

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32)).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(run_to_block(model, decoder_block(model, 1), {"input_ids": ids}), expected)
