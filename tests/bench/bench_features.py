"""Feature extraction against the bare forward pass, and a training step of an SAE against sae-lens' own.

    python tests/bench/bench_features.py [--texts 96] [--rounds 5] [--width 8192] [--layer 15] [--threads 2]

Part one: all sides see the same texts of the shipped anchor, with the embedded model in float32 and one TopK SAE (k 32)
of random weights. They alternate A B C D E A B C D E; printed are medians of own tokens per second and of the ratios
within a round.

- *bare forward*: the model's blocks up to the layer, chats tokenised and batched beforehand, nothing kept.
- *hidden states*: the engine alone, which tokenises, batches by length and computes the shared prefix once.
- *Headwater*: the engine and `extract_features`.
- *naive dense*: the bare pass, then a dense (tokens × width) matrix per batch, masked and max-pooled.
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

from headwater.llm.batching import length_batches
from headwater.llm.embedded import embedded_model_folder
from headwater.llm.hidden import decoder_block, run_to_block
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
MAX_TOKENS = 512
Batch = tuple[Tensor, Tensor]
"""Token ids and own-token mask, both (batch, seq)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engine = TransformersEngine(model=embedded_model_folder(CACHE), name="smollm2-135m", cache=CACHE)
    chats = [[Message("user", text)] for text in texts(given.texts)]
    space = random_space(engine.model.config.hidden_size, given.width, given.layer)
    own = sum(sum(chat.own) for chat in engine.chat_format.encode(chats, max_tokens=MAX_TOKENS))
    print(f"{len(chats)} texts, {own} own tokens, layer {given.layer}, width {given.width}, {given.threads} threads")
    with torch.no_grad():
        report(alternate(sides(engine, chats, space), given.rounds, own))
    for dead in (0, 100):
        report_steps(dead, alternate(steps(dead), 4 * given.rounds, 1))


def sides(engine: TransformersEngine, chats: list[list[Message]], space: FeatureSpace) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; the first is what the others are compared with."""
    by_length = list(padded(engine, chats, max_batch_tokens=4096))
    in_order = list(padded(engine, chats, rows=DOCUMENTED_BATCH))
    block = decoder_block(engine.model, space.layer)
    documented = sae_lens_copy(space)

    def bare(ids: Tensor) -> Tensor:
        return run_to_block(engine.model, block, {"input_ids": ids, "use_cache": False})

    def whole(ids: Tensor) -> Tensor:
        states: Tensor = engine.model(ids, output_hidden_states=True).hidden_states[space.layer + 1]
        return states

    def hidden() -> Any:
        return engine.hidden_states(chats, space.layer, max_tokens=MAX_TOKENS)

    return {
        "bare forward": lambda: [bare(ids) for ids, _ in by_length],
        "hidden states": lambda: list(hidden()),
        "Headwater": lambda: list(extract_features(hidden(), space)),
        "naive dense": lambda: [pooled(space.encode, bare(ids), own) for ids, own in by_length],
        "sae-lens as documented": lambda: [pooled(documented.encode, whole(ids), own) for ids, own in in_order],
    }


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


def alternate(timed: dict[str, Callable[[], Any]], rounds: int, own: int) -> dict[str, list[float]]:
    """Own tokens per second of every side, round by round, after one round that doesn't count."""
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            started = time.perf_counter()
            run()
            if number:
                rates[name].append(own / (time.perf_counter() - started))
    return rates


def report(rates: dict[str, list[float]]) -> None:
    """One line per side; a ratio is the median of the rounds' ratios, so that what slows a round slows both sides."""
    first, *_ = rates
    print(f"{'':26}{'tokens/s':>10}{f'of {first}':>20}{'of hidden states':>18}")
    for name, found in rates.items():
        shares = [
            statistics.median(mine / base for mine, base in zip(found, rates[other], strict=True))
            for other in (first, "hidden states")
        ]
        print(f"{name:26}{statistics.median(found):10.0f}{shares[0]:20.2f}{shares[1]:18.2f}")


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
