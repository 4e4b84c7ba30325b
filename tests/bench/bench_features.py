"""Feature extraction against the bare forward pass, and a training step of an SAE against sae-lens' own.

    python tests/bench/bench_features.py [--texts 96] [--rounds 5] [--width 8192] [--layer 15] [--threads 2] [--cpu]

Part one: all sides see the same texts of the shipped anchor, with the embedded model in float32 and one TopK SAE (k 32)
of random weights. They alternate A B C D E A B C D E; printed are medians of own tokens per second and of the ratios
within a round. Two sides are what the others are compared with, as each alone would mislead:

- *bare forward*: what a person would write with care. The chats are templated, tokenised, sorted by length, padded and
  batched beforehand, at the batch size that proves fastest here; a plain transformers model stops at the layer; nothing
  is kept. But the tokens that the template puts before every text are read in every row.
- *hidden states*: the engine alone, like for like: it tokenises and batches as Headwater does below, and reads those
  tokens once for all rows. What Headwater loses against it is what the SAE costs.
- *Headwater*: the engine and `extract_features`.
- *naive dense*: the bare forward, then a dense (tokens × width) matrix per batch, masked and max-pooled.
- *sae-lens as documented*: texts in their own order in batches of 16, a whole forward pass that returns all hidden
  states, `SAE.encode` on every token, masked and max-pooled.

Part two: loss and gradients of one TopK training step, 512 tokens at width 2,048, by sae-lens' training class and by
ours, which give the same numbers (the tests hold that); without and with 100 dead features to revive.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headwater.llm.batching import length_batches
from headwater.llm.embedded import embedded_model_folder
from headwater.llm.hidden import decoder_block, run_to_block, shared_prefix
from headwater.llm.transformers import TransformersEngine
from headwater.llm.types import Message
from headwater.sae.config import SaeTrainConfig
from headwater.sae.extract import extract_features
from headwater.sae.saelens import quiet_sae_lens
from headwater.sae.space import FeatureSpace, TopK

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".build" / "cache"
K = 32
DOCUMENTED_BATCH = 16
BATCH_TOKENS = (128, 256, 512, 1024, 2048, 4096)
"""Padded tokens per batch that the bare forward pass tries."""
TRIES = 2
AIM = 0.9
BARE, LIKE_FOR_LIKE, OURS = "bare forward", "hidden states", "Headwater"
MAX_TOKENS = 512
Clock = Callable[[], float]
Batch = tuple[Tensor, Tensor]
"""Token ids and own-token mask, both (batch, seq)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu", action="store_true", help="count CPU seconds: where others use the machine, with 1 thread"
    )
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    torch.set_num_threads(given.threads)
    engine = TransformersEngine(model=embedded_model_folder(CACHE), name="smollm2-135m", cache=CACHE)
    chats = [[Message("user", text)] for text in texts(given.texts)]
    space = random_space(engine.model.config.hidden_size, given.width, given.layer)
    encoded = engine.chat_format.encode(chats, max_tokens=MAX_TOKENS)
    own = sum(sum(chat.own) for chat in encoded)
    print(f"{len(chats)} texts, {own} own tokens, layer {given.layer}, width {given.width}, {given.threads} threads")
    shared, whole = shared_prefix(encoded), sum(len(chat.token_ids) for chat in encoded)
    print(f"the template begins every text with the same {shared} tokens, {shared * len(chats)} of {whole} in all")
    with torch.no_grad():
        report(alternate(sides(engine, chats, space, clock), given.rounds, own, clock))
    for dead in (0, 100):
        report_steps(dead, alternate(steps(dead), 4 * given.rounds, 1, clock))


def sides(
    engine: TransformersEngine, chats: list[list[Message]], space: FeatureSpace, clock: Clock
) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    in_order = list(padded(engine, chats, rows=DOCUMENTED_BATCH))
    plain = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32).eval()
    block = decoder_block(plain, space.layer)
    documented = sae_lens_copy(space)

    def bare(ids: Tensor) -> Tensor:
        return run_to_block(plain, block, {"input_ids": ids, "use_cache": False})

    def whole(ids: Tensor) -> Tensor:
        states: Tensor = plain(ids, output_hidden_states=True).hidden_states[space.layer + 1]
        return states

    def hidden() -> Any:
        return engine.hidden_states(chats, space.layer, max_tokens=MAX_TOKENS)

    by_length = fastest_batches(engine, chats, bare, clock)
    return {
        BARE: lambda: [bare(ids) for ids, _ in by_length],
        LIKE_FOR_LIKE: lambda: list(hidden()),
        OURS: lambda: list(extract_features(hidden(), space)),
        "naive dense": lambda: [pooled(space.encode, bare(ids), own) for ids, own in by_length],
        "sae-lens as documented": lambda: [pooled(documented.encode, whole(ids), own) for ids, own in in_order],
    }


def fastest_batches(
    engine: TransformersEngine, chats: list[list[Message]], bare: Callable[[Tensor], Tensor], clock: Clock
) -> list[Batch]:
    """The batches by length with which the bare forward pass is fastest: a badly batched baseline would flatter us."""
    tried = {most: list(padded(engine, chats, max_batch_tokens=most)) for most in BATCH_TOKENS}
    seconds: dict[int, list[float]] = {most: [] for most in tried}
    for _ in range(TRIES):
        for most, batches in tried.items():
            started = clock()
            for ids, _own in batches:
                bare(ids)
            seconds[most].append(clock() - started)
    best = {most: min(found) for most, found in seconds.items()}
    fastest = min(best, key=best.__getitem__)
    times = ", ".join(f"{most}: {took:.2f} s" for most, took in best.items())
    print(f"bare forward by tokens per batch, best of {TRIES}: {times}; {fastest} is taken")
    return tried[fastest]


def steps(n_dead: int) -> dict[str, Callable[[], Any]]:
    """One training step of the same SAE on the same tokens, in two ways."""
    quiet_sae_lens()
    from sae_lens.saes.sae import TrainStepInput

    from headwater.sae.architectures import build_trainee

    torch.manual_seed(0)
    trainee = build_trainee(SaeTrainConfig(width=2048, k=K), 576)
    x = torch.randn(512, 576)
    dead = torch.arange(2048) < n_dead

    def theirs() -> None:
        trainee.sae.training_forward_pass(TrainStepInput(x, {}, dead, 0, False)).loss.backward()
        trainee.sae.zero_grad()

    def ours() -> None:
        trainee.loss(x, 0, dead)[0].backward()  # type: ignore[no-untyped-call]
        trainee.sae.zero_grad()

    return {"sae-lens": theirs, "Headwater": ours}


def report_steps(n_dead: int, rates: dict[str, list[float]]) -> None:
    """One line: milliseconds per step of both, and how many times faster ours is."""
    theirs, ours = (1000 / statistics.median(found) for found in rates.values())
    faster = f"{theirs / ours:.1f} times faster"
    print(f"training step, {n_dead} dead: sae-lens {theirs:.0f} ms, Headwater {ours:.0f} ms, {faster}")


def pooled(encode: Callable[[Tensor], Tensor], hidden: Tensor, own: Tensor) -> Tensor:
    """Maxima over own tokens (batch, width), by way of everybody's features (batch, seq, width)."""
    flat = encode(hidden.flatten(0, 1))
    features: Tensor = flat.unflatten(0, hidden.shape[:2])  # type: ignore[no-untyped-call]
    return features.masked_fill(~own[..., None], 0.0).amax(dim=1)


def alternate(timed: dict[str, Callable[[], Any]], rounds: int, own: int, clock: Clock) -> dict[str, list[float]]:
    """Own tokens per second of every side, round by round, after one round that doesn't count."""
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            started = clock()
            run()
            if number:
                rates[name].append(own / (clock() - started))
    return rates


def report(rates: dict[str, list[float]]) -> None:
    """One line per side, and what it comes to in words."""
    print(f"{'':26}{'tokens/s':>10}{f'of {BARE}':>20}{f'of {LIKE_FOR_LIKE}':>18}")
    for name, found in rates.items():
        print(
            f"{name:26}{statistics.median(found):10.0f}"
            f"{share(rates, name, BARE):20.2f}{share(rates, name, LIKE_FOR_LIKE):18.2f}"
        )
    bare, alike = share(rates, OURS, BARE), share(rates, OURS, LIKE_FOR_LIKE)
    print(f"feature extraction, in tokens/s of the same texts (the aim is {AIM}):")
    print(f"  (a) {bare:.2f} of a bare forward pass written with care, which reads the template's tokens in every row")
    print(f"  (b) {alike:.2f} of its own forward pass, like for like: the template read once, the same batches")


def share(rates: dict[str, list[float]], name: str, base: str) -> float:
    """The median of the rounds' ratios, so that what slows a round slows both sides."""
    return statistics.median(mine / theirs for mine, theirs in zip(rates[name], rates[base], strict=True))


def padded(
    engine: TransformersEngine, chats: list[list[Message]], *, max_batch_tokens: int = 0, rows: int = 0
) -> Iterator[Batch]:
    """Batches by length like the engine's, or `rows` at a time in the given order."""
    encoded = engine.chat_format.encode(chats, max_tokens=MAX_TOKENS)
    groups: Sequence[Sequence[int]] = (
        [range(start, min(start + rows, len(encoded))) for start in range(0, len(encoded), rows)]
        if rows
        else length_batches([len(chat.token_ids) for chat in encoded], max_batch_tokens)
    )
    for group in groups:
        longest = max(len(encoded[i].token_ids) for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        own = torch.zeros(len(group), longest, dtype=torch.bool)
        for line, i in enumerate(group):
            ids[line, : len(encoded[i].token_ids)] = torch.tensor(encoded[i].token_ids)
            own[line, : len(encoded[i].own)] = torch.tensor(encoded[i].own)
        yield ids, own


def random_space(d_model: int, width: int, layer: int) -> FeatureSpace:
    """Unit directions, tied: how fast it encodes doesn't depend on what it learned."""
    torch.manual_seed(0)
    w_dec = torch.nn.functional.normalize(torch.randn(width, d_model), dim=1)
    weights = {"W_enc": w_dec.T, "W_dec": w_dec, "b_enc": torch.zeros(width), "b_dec": torch.zeros(d_model)}
    return FeatureSpace.from_weights(weights, TopK(K), model="smollm2-135m", layer=layer)


def sae_lens_copy(space: FeatureSpace) -> Any:
    """The same SAE as sae-lens loads it."""
    quiet_sae_lens()
    from sae_lens import SAE

    with tempfile.TemporaryDirectory() as folder:
        space.save(Path(folder))
        return SAE.load_from_disk(folder)


def texts(count: int) -> list[str]:
    """Texts of the shipped anchor, evenly spread over its kinds."""
    lines = (ROOT / "pipelines" / "data" / "anchor.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // count)]][:count]


if __name__ == "__main__":
    main()
