"""Loading an SAE that somebody trained, from a disk and without a network.

| what | recognised by |
|---|---|
| sae-lens or Headwater folder | `cfg.json` and `sae_weights.safetensors` |
| sparsify folder | `cfg.json` and `sae.safetensors`; a run's folder holds one such folder per hookpoint |
| FAC authors' `.pth` | a pickled dict with `weight` and `config` |
| Qwen-Scope `.pt` | a pickled dict with `W_enc`, `W_dec`, `b_enc` and `b_dec` |
| sae-lens release | its name in sae-lens' registry, when its files lie in the local Hugging Face cache |

Pickled files can run code when they are opened. They are refused unless the caller allows them, and are then read with
torch's restricted unpickler only.
"""

from __future__ import annotations

from pathlib import Path

from headwater.core.errors import ConfigError
from headwater.sae.hints import Hints, malformed
from headwater.sae.read_pickled import PICKLED_SUFFIXES, read_pickled
from headwater.sae.read_release import read_release
from headwater.sae.read_saelens import read_saelens
from headwater.sae.read_sparsify import SPARSIFY_WEIGHTS_FILE, read_sparsify
from headwater.sae.space import CFG_FILE, WEIGHTS_FILE, FeatureSpace


def load_space(
    source: str | Path,
    *,
    sae_id: str = "",
    model: str = "",
    fallback_model: str = "",
    layer: int | None = None,
    k: int | None = None,
    input_scale: float | None = None,
    allow_pickle: bool = False,
) -> FeatureSpace:
    """Load the SAE at `source`: a folder, a file, or the name of a sae-lens release.

    What a file doesn't say must be given, and what it says must not be contradicted: `model` is the name of the model
    (it alone may replace what a file says), `fallback_model` its name where the file is silent, `layer` the 0-based
    decoder block, `k` the number of features a TopK SAE keeps per token, `input_scale` the factor by which activations
    were multiplied before the SAE saw them. `sae_id` picks one SAE of a release, or one hookpoint folder of a sparsify
    run. `allow_pickle` permits `.pt` and `.pth` files.

    Raises ConfigError for anything missing, contradictory, damaged or not supported.
    """
    hints = Hints(model=model, fallback_model=fallback_model, layer=layer, k=k, input_scale=input_scale)
    path = Path(source).expanduser()
    if path.is_dir():
        with malformed(path.name):
            return _read_folder(path / sae_id if sae_id else path, hints)
    if path.is_file():
        with malformed(path.name):
            return _read_file(path, hints, allow_pickle=allow_pickle)
    if len(path.parts) > 1 or path.suffix in PICKLED_SUFFIXES:
        raise ConfigError(f"There is no file or folder {source}.", todo="Check the path of the SAE.")
    return read_release(str(source), sae_id, hints, allow_pickle=allow_pickle)


def _read_folder(folder: Path, hints: Hints) -> FeatureSpace:
    if (folder / CFG_FILE).is_file():
        if (folder / WEIGHTS_FILE).is_file():
            return read_saelens(folder, hints)
        if (folder / SPARSIFY_WEIGHTS_FILE).is_file():
            return read_sparsify(folder, hints)
    found = sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(f"**/{CFG_FILE}"))
    if found and found != ["."]:
        raise ConfigError(
            f"{folder.name} holds several SAEs: {', '.join(found[:8])}{' …' if len(found) > 8 else ''}.",
            todo="Name one of them as sae_id.",
        )
    raise ConfigError(
        f"{folder} is no SAE folder.",
        todo=f"It needs {CFG_FILE} beside {WEIGHTS_FILE} (sae-lens) or {SPARSIFY_WEIGHTS_FILE} (sparsify).",
    )


def _read_file(path: Path, hints: Hints, *, allow_pickle: bool) -> FeatureSpace:
    if path.suffix not in PICKLED_SUFFIXES:
        raise ConfigError(
            f"{path.name} is no SAE file that Headwater knows.",
            todo=f"Give the folder that holds {CFG_FILE}, or a {' or '.join(PICKLED_SUFFIXES)} file.",
        )
    if not allow_pickle:
        raise ConfigError(
            f"{path.name} is a pickled file, which may run code when it is opened.",
            todo="Set allow_pickle: true to read it with torch's restricted unpickler (weights_only), "
            "or convert it to safetensors.",
        )
    return read_pickled(path, hints)
