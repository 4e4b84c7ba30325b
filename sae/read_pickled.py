"""Reading pickled SAEs, the FAC authors' `.pth` and Qwen-Scope's `.pt`, through torch's restricted unpickler."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.sae.hints import Hints, pick
from headwater.sae.space import FeatureSpace, TopK

if TYPE_CHECKING:
    from torch import Tensor

PICKLED_SUFFIXES = (".pt", ".pth")
_FAC_LAYER = re.compile(r"_l(\d+)_")
_QWEN_LAYER = re.compile(r"layer(\d+)\.sae\.pt")
_QWEN_REPOSITORY = re.compile(r"SAE-Res-(?P<model>.+)-W\d+K-L0_(?P<k>\d+)")


def read_pickled(path: Path, hints: Hints) -> FeatureSpace:
    """The SAE in `path`. Raises ConfigError when it holds anything but tensors and plain values, or no SAE."""
    content = _unpickled(path)
    if isinstance(content, dict) and {"weight", "config"} <= content.keys():
        return _fac(content, path, hints)
    if isinstance(content, dict) and {"W_enc", "W_dec"} <= content.keys():
        return _qwen_scope(content, path, hints)
    raise ConfigError(
        f"{path.name} is neither an FAC checkpoint (weight, config) nor a Qwen-Scope one (W_enc, W_dec, b_enc, b_dec).",
        todo="Convert it to a sae-lens folder.",
    )


def _unpickled(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a protocol that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file ends in errors of any kind; torch's own text advises against the guard
        raise ConfigError(
            f"{path.name} can't be read as plain tensors ({type(error).__name__}).",
            todo="It is damaged, or holds Python objects, which Headwater never loads: convert it to safetensors.",
        ) from error


def _fac(content: dict[str, Any], path: Path, hints: Hints) -> FeatureSpace:
    """Tied weights, TopK; the file name counts decoder blocks from 1 (`_l16_` is block 15)."""
    weight: dict[str, Tensor] = content["weight"]
    w_enc = pick(weight, "W_enc", path.name)
    named = _FAC_LAYER.search(path.name)
    return FeatureSpace.from_weights(
        {
            "W_enc": w_enc,
            "W_dec": w_enc.T,
            "b_enc": pick(weight, "b_enc", path.name),
            "b_dec": pick(weight, "b_dec", path.name),
        },
        TopK(hints.k_or(content["config"].get("topK"), path.name)),
        model=hints.model_or("", path.name),
        layer=hints.layer_or(int(named[1]) - 1 if named else None, path.name),
        input_scale=1.0 if hints.input_scale is None else hints.input_scale,
    )


def _qwen_scope(content: dict[str, Any], path: Path, hints: Hints) -> FeatureSpace:
    """Weights are stored (d_sae, d_in) and (d_in, d_sae); b_dec isn't subtracted; k stands in the repository's name."""
    repository = next((found for part in reversed(path.parts) if (found := _QWEN_REPOSITORY.search(part))), None)
    named = _QWEN_LAYER.fullmatch(path.name)
    return FeatureSpace.from_weights(
        {
            "W_enc": content["W_enc"].T,
            "W_dec": content["W_dec"].T,
            "b_enc": pick(content, "b_enc", path.name),
            "b_dec": pick(content, "b_dec", path.name),
        },
        TopK(hints.k_or(int(repository["k"]) if repository else None, path.name)),
        model=hints.model_or(f"Qwen/{repository['model']}" if repository else "", path.name),
        layer=hints.layer_or(int(named[1]) if named else None, path.name),
        subtract_b_dec=False,
        input_scale=1.0 if hints.input_scale is None else hints.input_scale,
    )
