"""Batched chats: each row gets its own reply, whoever is in the batch, and no reply that is not data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headwater.core.errors import BadOutput, ConfigError
from headwater.llm.types import ChatOutcome, ChatRequest, Completion, Message, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

torch = pytest.importorskip("torch", reason="the local engines need the extra `local`")

from headwater.llm.replies import cut_at_stop  # noqa: E402
from headwater.llm.transformers import TransformersEngine  # noqa: E402

GREEDY = Sampling(temperature=0, max_tokens=12)
WARM = Sampling(temperature=0.9, top_p=0.95, max_tokens=16)


def ask(text: str, sampling: Sampling, seed: int = 0, name: str = "", prefill: str = "") -> ChatRequest:
    messages = [Message("user", text)] + ([Message("assistant", prefill)] if prefill else [])
    return ChatRequest(name or f"{text}/{seed}", tuple(messages), sampling, seed)


async def replies(engine: TransformersEngine, requests: list[ChatRequest]) -> dict[str, ChatOutcome]:
    outcomes = [outcome async for outcome in engine.chat(requests)]
    assert sorted(o.request_id for o in outcomes) == sorted(r.id for r in requests)
    return {o.request_id: o for o in outcomes}


def raw(outcome: ChatOutcome) -> str:
    """The text, cut or not."""
    assert isinstance(outcome.result, Completion | BadOutput)
    return outcome.result.text if isinstance(outcome.result, Completion) else outcome.result.raw


def reference(engine: TransformersEngine, request: ChatRequest) -> str:
    """Greedy decoding by transformers' own generate, one row, nothing cached or padded by us."""
    ids = engine.tokenizer(engine.chat_format.prompt(request.messages), return_tensors="pt", add_special_tokens=False)
    out = engine.model.generate(
        **ids, do_sample=False, max_new_tokens=request.sampling.max_tokens, pad_token_id=engine.tokenizer.pad_token_id
    )
    return str(engine.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


QUESTIONS = [
    "What is the capital of France?",
    "Name a colour.",
    "Write one short sentence about the sea, the wind and a small boat that nobody wanted to sail.",
    "Hi!",
    "Count from 1 to 9.",
]


@pytest.fixture(scope="session")
def narrow(smollm_folder: str) -> TransformersEngine:
    """Two rows at a time, so that rows have to join and leave."""
    return TransformersEngine(model=smollm_folder, max_batch_rows=2)


async def test_greedy_replies_equal_generate_though_rows_join_and_leave(narrow: TransformersEngine) -> None:
    requests = [
        ask(q, Sampling(temperature=0, max_tokens=n)) for q, n in zip(QUESTIONS, [12, 3, 20, 7, 40], strict=True)
    ]
    got = await replies(narrow, requests)
    for request in requests:
        assert raw(got[request.id]) == reference(narrow, request)


async def test_a_reply_longer_than_the_spare_columns_equals_generate(engine: TransformersEngine) -> None:
    request = ask("Tell me a story.", Sampling(temperature=0, max_tokens=36))
    got = await replies(engine, [request, ask("Describe a forest.", Sampling(temperature=0, max_tokens=34))])
    assert raw(got[request.id]) == reference(engine, request)


async def test_a_row_draws_the_same_whoever_is_in_the_batch(
    engine: TransformersEngine, narrow: TransformersEngine
) -> None:
    requests = [ask(q, WARM, seed) for seed, q in enumerate(QUESTIONS)]
    together = await replies(engine, requests)
    in_pairs = await replies(narrow, requests[::-1])
    assert {k: raw(v) for k, v in together.items()} == {k: raw(v) for k, v in in_pairs.items()}


async def test_seeds_vary_the_reply_and_equal_seeds_repeat_it(engine: TransformersEngine) -> None:
    requests = [ask("Name an animal and a place.", WARM, seed, f"{seed}/{k}") for seed in range(4) for k in (0, 1)]
    got = {name: raw(outcome) for name, outcome in (await replies(engine, requests)).items()}
    assert all(got[f"{seed}/0"] == got[f"{seed}/1"] for seed in range(4))
    assert len(set(got.values())) > 2


async def test_a_reply_that_reaches_the_limit_is_not_data(engine: TransformersEngine) -> None:
    request = ask("Tell me a very long story.", Sampling(temperature=0, max_tokens=5))
    result = (await replies(engine, [request]))[request.id].result
    assert isinstance(result, BadOutput)
    assert result.reason == "cut_at_length"
    assert result.raw == reference(engine, request)
    assert result.tokens[0] > 5 and result.tokens[2] == 5


async def test_a_reply_that_ends_by_itself_counts_its_tokens(engine: TransformersEngine) -> None:
    request = ask("What is the capital of France?", Sampling(temperature=0, max_tokens=60))
    result = (await replies(engine, [request]))[request.id].result
    assert isinstance(result, Completion)
    prompt = engine.tokenizer(engine.chat_format.prompt(request.messages), add_special_tokens=False)["input_ids"]
    assert result.usage.tokens_in == len(prompt)
    assert result.usage.tokens_out == len(engine.tokenizer(result.text)["input_ids"]) + 1


async def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(engine: TransformersEngine) -> None:
    free = ask("Count from 1 to 9.", Sampling(temperature=0, max_tokens=30), name="free")
    text = raw((await replies(engine, [free]))["free"])
    stop = text[7:10]
    stopped = ask("Count from 1 to 9.", Sampling(temperature=0, max_tokens=30, stop=(stop,)), name="stopped")
    result = (await replies(engine, [stopped]))["stopped"].result
    assert isinstance(result, Completion)
    assert result.text == text[: text.index(stop)]
    assert result.usage.tokens_out < 30


async def test_a_stop_text_at_the_start_leaves_an_empty_reply(engine: TransformersEngine) -> None:
    first = reference(engine, ask("Hi!", Sampling(temperature=0, max_tokens=1)))
    request = ask("Hi!", Sampling(temperature=0, max_tokens=9, stop=(first,)))
    result = (await replies(engine, [request]))[request.id].result
    assert isinstance(result, BadOutput)
    assert result.reason == "empty_reply"


async def test_a_prefill_is_continued_and_not_repeated(engine: TransformersEngine) -> None:
    request = ask("What is the capital of France?", GREEDY, prefill="The capital of France is")
    text = raw((await replies(engine, [request]))[request.id])
    assert text == reference(engine, request)
    assert text.startswith(" Paris")


async def test_many_samples_of_one_prompt_share_its_past(engine: TransformersEngine) -> None:
    requests = [ask("Name a colour.", GREEDY, 0, f"sample {k}") for k in range(3)]
    got = await replies(engine, requests)
    assert {raw(o) for o in got.values()} == {reference(engine, requests[0])}


async def test_a_prompt_beyond_the_context_is_refused_alone(engine: TransformersEngine) -> None:
    long, short = ask("word " * 9000, GREEDY, name="long"), ask("Hi!", GREEDY, name="short")
    got = await replies(engine, [long, short])
    assert isinstance(got["long"].result, BadOutput)
    assert got["long"].result.reason == "prompt_too_long"
    assert raw(got["short"]) == reference(engine, short)


async def test_no_requests_give_no_outcomes(engine: TransformersEngine) -> None:
    assert await replies(engine, []) == {}


async def test_a_caller_that_leaves_early_stops_the_decoding(engine: TransformersEngine) -> None:
    requests = [ask(q, Sampling(temperature=0, max_tokens=n)) for q, n in (("Hi!", 1), ("Tell me a long story.", 4000))]
    stream = engine.chat(requests)
    assert (await anext(stream)).request_id == requests[0].id
    await stream.aclose()
    assert len(await replies(engine, [ask("Hi!", GREEDY)])) == 1


def test_the_first_stop_text_counts() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == ("one ", True)
    assert cut_at_stop("one two", ["four"]) == ("one two", False)


async def test_a_model_without_a_template_says_so_for_each_request(narrow: TransformersEngine) -> None:
    template = narrow.tokenizer.chat_template
    narrow.tokenizer.chat_template = None
    try:
        got = await replies(narrow, [ask("Hi!", GREEDY)])
    finally:
        narrow.tokenizer.chat_template = template
    [outcome] = got.values()
    assert isinstance(outcome.result, ConfigError)


def test_models_of_another_layout_decode_like_generate() -> None:
    """A random Gemma-2: sliding windows on every other block, squashed logits, grouped heads."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from headwater.llm.kv import use_grouped_attention

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=256, initializer_range=0.4,
        eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    use_grouped_attention(model)
    assert_decodes_like_generate(model)


def test_models_without_grouped_heads_decode_like_generate() -> None:
    """A random GPT-2: learned positions, one key head per query head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.4,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    assert_decodes_like_generate(GPT2LMHeadModel(config).eval())


def assert_decodes_like_generate(model: PreTrainedModel) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from headwater.llm.chat import ChatFormat
    from headwater.llm.generate import Generator

    letters = [chr(97 + i) for i in range(26)] + [chr(65 + i) for i in range(26)] + [str(i) for i in range(9)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<bos>", *letters])}, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = ["abcdefghijklmnop", "xyz", "hello", "aZ", "thequickbrownfox"]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    generator = Generator(
        model, ChatFormat(tokenizer), max_rows=2, max_cache_tokens=4096, max_batch_tokens=64, stopped=lambda: False
    )
    requests = [ask(p, Sampling(temperature=0, max_tokens=40), name=p) for p in prompts]
    got = {o.request_id: raw(o) for group in generator.run(requests) for o in group}
    assert [got[p] for p in prompts] == expected


def test_a_recurrent_model_is_refused_with_the_way_out() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from headwater.llm.kv import check_past

    model = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, state_size=4))
    with pytest.raises(ConfigError, match="recurrent state"):
        check_past(model)


async def test_rows_with_one_prompt_share_its_computation_and_keep_their_own_draws(engine: TransformersEngine) -> None:
    read: list[int] = []
    hook = engine.model.get_input_embeddings().register_forward_hook(lambda _m, args, _o: read.append(args[0].numel()))
    try:
        alone = await replies(engine, [ask(QUESTIONS[2], WARM, seed=3)])
        once, read[:] = max(read), []
        together = await replies(engine, [ask(QUESTIONS[2], WARM, seed=seed) for seed in range(6)])
    finally:
        hook.remove()
    assert max(read) <= once
    assert raw(together[f"{QUESTIONS[2]}/3"]) == raw(alone[f"{QUESTIONS[2]}/3"])
    assert len({raw(outcome) for outcome in together.values()}) > 1
