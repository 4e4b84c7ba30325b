"""Log-probabilities equal those of the plain model, and memory stays bounded by chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headwater.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="the local engines need the extra `local`")

from headwater.llm import score  # noqa: E402
from headwater.llm.transformers import TransformersEngine  # noqa: E402

TEXTS = [
    "The capital of France is Paris.",
    "",
    "a",
    "Rain falls on the sea, again and again.",
    "12 + 30 = 42",
]


def test_scores_equal_the_log_softmax_of_the_plain_model(engine: TransformersEngine) -> None:
    for text, scores in zip(TEXTS, engine.score(TEXTS), strict=True):
        ids = engine.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        assert scores.token_ids.tolist() == ids[0].tolist()
        if ids.shape[1] > 1:
            with torch.inference_mode():
                logprobs = engine.model(ids).logits[0].double().log_softmax(-1)
            expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
            np.testing.assert_allclose(scores.logprobs[1:], expected.numpy(), atol=1e-4)


def test_the_first_token_has_no_score_and_an_empty_text_none_at_all(engine: TransformersEngine) -> None:
    [_, empty, single, *_] = engine.score(TEXTS)
    assert empty.logprobs.shape == (0,)
    assert single.logprobs.shape == (1,)
    assert math.isnan(single.logprobs[0])
    assert single.logprobs.dtype == np.float32


def test_small_chunks_change_nothing(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [s.logprobs for s in engine.score(TEXTS)]
    monkeypatch.setattr(score, "_CHUNK_LOGITS", 3 * 49152)
    monkeypatch.setattr(score, "_WINDOW_TEXTS", 2)
    for before, now in zip(whole, (s.logprobs for s in engine.score(TEXTS)), strict=True):
        np.testing.assert_allclose(now, before, atol=1e-4)


def test_a_text_beyond_the_context_is_named(engine: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match=r"Text 1 has \d+ tokens; the model's context holds 8192"):
        list(engine.score(["short", "word " * 9000]))


def test_logits_that_a_model_squashes_are_squashed_here_too() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=2.0, final_logit_softcapping=5.0,
        )
    ).eval()  # fmt: skip
    row = [5, 9, 33, 60, 2]
    with torch.inference_mode():
        expected = model(torch.tensor([row])).logits[0].log_softmax(-1)[range(4), row[1:]]
    [got] = score._batch(model, [row])
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
