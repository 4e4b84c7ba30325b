"""Reading a hookpoint folder of EleutherAI's sparsify: `cfg.json` and `sae.safetensors`.

sparsify subtracts b_dec from the input of every autoencoder, whether or not its decoder is normalised, and keeps both
weight matrices as (latents, d_in).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError
from headwater.sae.hints import Hints, pick, read_json, read_safetensors
from headwater.sae.space import CFG_FILE, FeatureSpace, TopK

SPARSIFY_WEIGHTS_FILE = "sae.safetensors"
_HOOKPOINT = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)")
_UNSUPPORTED = {
    "transcode": "is a transcoder",
    "skip_connection": "has a skip connection",
    "signed": "keeps negative values",
}


def read_sparsify(folder: Path, hints: Hints) -> FeatureSpace:
    """The SAE in `folder`, whose name is the hookpoint. Raises ConfigError for what isn't a TopK autoencoder."""
    config = read_json(folder / CFG_FILE)
    _check_supported(config, folder.name)
    tensors = read_safetensors(folder / SPARSIFY_WEIGHTS_FILE)
    weights = {
        "W_enc": pick(tensors, "encoder.weight", folder.name).T,
        "W_dec": pick(tensors, "W_dec", folder.name),
        "b_enc": pick(tensors, "encoder.bias", folder.name),
        "b_dec": pick(tensors, "b_dec", folder.name),
    }
    return FeatureSpace.from_weights(
        weights,
        TopK(hints.k_or(config.get("k"), folder.name)),
        model=hints.model_or(_model_of_run(folder), folder.name),
        layer=hints.layer_or(_layer(folder.name), folder.name),
        input_scale=1.0 if hints.input_scale is None else hints.input_scale,
    )


def _check_supported(config: dict[str, Any], source: str) -> None:
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise ConfigError(f"{source} {what}.", todo="Use a TopK autoencoder of the residual stream.")
    if config.get("activation", "topk") != "topk":
        raise ConfigError(f"{source} uses {config['activation']} activation.", todo="Use a TopK autoencoder.")


def _model_of_run(folder: Path) -> str:
    run = folder.parent / "config.json"
    return str(read_json(run).get("model") or "") if run.is_file() else ""


def _layer(hookpoint: str) -> int | None:
    if match := _HOOKPOINT.fullmatch(hookpoint):
        return int(match[1])
    if "." in hookpoint:
        raise ConfigError(
            f"The SAE reads {hookpoint}, which isn't the output of a decoder block.",
            todo="Use a hookpoint such as layers.12.",
        )
    return None
