"""Activations to train an SAE on: the own tokens of many texts, streamed to a file on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headwater.llm.hidden import HiddenBatch
    from headwater.llm.types import EngineIdentity, Message

HIGH_NORM_FACTOR = 10.0
"""Tokens whose norm is so many times the median are attention sinks; a few of them would rule the squared error."""
_TOKENS_FILE = "tokens.f32"
_ROWS_FILE = "rows.npy"
_ABOUT_FILE = "activations.json"
_BLOCK_TOKENS = 65536


class HiddenStatesEngine(Protocol):
    """The part of the transformers engine that is needed here."""

    @property
    def identity(self) -> EngineIdentity: ...

    def hidden_states(
        self,
        conversations: Sequence[Sequence[Message]],
        layer: int,
        *,
        max_tokens: int = 512,
        roles: Sequence[str] = ("user",),
    ) -> Iterator[HiddenBatch]: ...


@dataclass(frozen=True, eq=False)
class Activations:
    """Outputs of one decoder block, token by token."""

    tokens: NDArray[np.float32]
    """Shape (tokens, d_model); a memory map when it was collected."""
    rows: NDArray[np.int32]
    """Shape (tokens,): which text a token comes from."""
    model: str
    layer: int
    """0-based index of the decoder block."""
    dropped: int = 0
    """How many tokens of high norm were left out."""
    median_norm: float = 0.0
    """Of all tokens, the dropped ones included; 0.0 when it wasn't measured."""

    @classmethod
    def open(cls, folder: Path) -> Activations:
        """What `collect_activations` left in `folder`."""
        about = json.loads((folder / _ABOUT_FILE).read_text(encoding="utf-8"))
        shape = (about.pop("n_tokens"), about.pop("d_model"))
        tokens = np.memmap(folder / _TOKENS_FILE, dtype=np.float32, mode="r", shape=shape)
        return cls(tokens=tokens, rows=np.load(folder / _ROWS_FILE), **about)


def collect_activations(
    engine: HiddenStatesEngine,
    conversations: Sequence[Sequence[Message]],
    layer: int,
    folder: Path,
    *,
    max_tokens: int = 512,
    roles: Sequence[str] = ("user",),
    high_norm_factor: float = HIGH_NORM_FACTOR,
) -> Activations:
    """Run `conversations` through the model and keep block `layer`'s output at their own tokens, in `folder`.

    Needs 4 · d_model bytes of disk per token and little memory. Tokens whose norm exceeds `high_norm_factor` times the
    median norm are dropped and counted. Raises ConfigError when no token is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _TOKENS_FILE
    rows: list[NDArray[np.int32]] = []
    norms: list[NDArray[np.float32]] = []
    with path.open("wb") as file:
        for batch in engine.hidden_states(conversations, layer, max_tokens=max_tokens, roles=roles):
            own = batch.own
            block = batch.hidden[own].float().cpu().numpy()
            block.tofile(file)
            rows.append(np.repeat(np.asarray(batch.rows, dtype=np.int32), own.sum(dim=1).cpu().numpy()))
            norms.append(np.linalg.norm(block, axis=1))
    if not sum(map(len, rows)):
        raise ConfigError("The texts have no tokens to train an SAE on.", todo="Give texts that aren't empty.")
    all_rows, all_norms = np.concatenate(rows), np.concatenate(norms)
    median = float(np.median(all_norms))
    kept = all_norms <= high_norm_factor * median
    d_model = path.stat().st_size // (4 * len(all_norms))
    _keep_only(path, kept, d_model)
    np.save(folder / _ROWS_FILE, all_rows[kept].astype(np.int32))
    about = {
        "n_tokens": int(kept.sum()),
        "d_model": d_model,
        "model": engine.identity.model,
        "layer": layer,
        "dropped": int((~kept).sum()),
        "median_norm": median,
    }
    (folder / _ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Activations.open(folder)


def _keep_only(path: Path, kept: NDArray[np.bool_], d_model: int) -> None:
    """Close the gaps inside the file, block by block, and cut what is left over."""
    if kept.all():
        return
    tokens = np.memmap(path, dtype=np.float32, mode="r+", shape=(len(kept), d_model))
    end = 0
    for start in range(0, len(kept), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS][kept[start : start + _BLOCK_TOKENS]]
        tokens[end : end + len(block)] = block
        end += len(block)
    tokens.flush()
    del tokens
    os.truncate(path, end * 4 * d_model)
