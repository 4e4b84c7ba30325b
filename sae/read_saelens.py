"""Reading an SAE folder in sae-lens' layout: today's, the one before version 6, and Headwater's own.

Read here rather than through sae-lens, whose import takes seconds; the tests hold both to the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.sae.hints import Hints, pick, read_json, read_safetensors
from headwater.sae.space import (
    CFG_FILE,
    SPACE_FILE,
    SPACE_FORMAT,
    WEIGHTS_FILE,
    Activation,
    FeatureSpace,
    JumpRelu,
    Relu,
    TopK,
)

if TYPE_CHECKING:
    from torch import Tensor

_TRANSFORMER_LENS_HOOK = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")
_MODULE_PATH = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)")


def read_saelens(folder: Path, hints: Hints) -> FeatureSpace:
    """The SAE in `folder`. Raises ConfigError for architectures and normalisations that aren't supported."""
    config = read_json(folder / CFG_FILE)
    tensors = read_safetensors(folder / WEIGHTS_FILE)
    source = folder.name
    _check_supported(config, source)
    about = _space_facts(folder)
    metadata = config.get("metadata") or config
    check_model_untouched(metadata.get("model_from_pretrained_kwargs"), source)
    hook = str(metadata.get("hook_name") or metadata.get("hook_point") or "")
    space = FeatureSpace.from_weights(
        {name: pick(tensors, name, source) for name in ("W_enc", "W_dec", "b_enc", "b_dec")},
        _activation(config, tensors, hints, source),
        model=hints.model_or(about.get("model") or str(metadata.get("model_name") or ""), source),
        layer=hints.layer_or(about.get("layer", layer_of_hook(hook)), source),
        subtract_b_dec=bool(config.get("apply_b_dec_to_input", True)),
        decoder_norm_scales=bool(config.get("rescale_acts_by_decoder_norm", False)),
        input_scale=1.0 if about else _input_scale(config, hints, source),
        facts=about.get("facts"),
    )
    _check_sizes(config, space, source)
    return space.in_unit(about["input_scale"]) if about else space


def layer_of_hook(hook: str) -> int | None:
    """The decoder block whose output `hook` names, None for no hook; ConfigError for any other place in a model."""
    if not hook:
        return None
    if match := _TRANSFORMER_LENS_HOOK.fullmatch(hook):
        layer = int(match[1]) - (match[2] == "pre")
        if layer >= 0:
            return layer
    elif match := _MODULE_PATH.fullmatch(hook):
        return int(match[1])
    raise ConfigError(
        f"The SAE reads {hook}, which isn't the output of a decoder block.",
        todo="Use an SAE of the residual stream behind a block (hook_resid_post).",
    )


def check_model_untouched(kwargs: Mapping[str, Any] | None, source: str) -> None:
    """ConfigError for an SAE of activations that only TransformerLens' rewritten weights give."""
    if kwargs and kwargs.get("center_writing_weights"):
        raise ConfigError(
            f"{source} was trained on a model whose weights TransformerLens rewrote (center_writing_weights).",
            todo="Use an SAE of the model as it is published.",
        )


def _space_facts(folder: Path) -> dict[str, Any]:
    path = folder / SPACE_FILE
    if not path.is_file():
        return {}
    about = read_json(path)
    if about.get("format") != SPACE_FORMAT:
        raise ConfigError(
            f"{path} has format {about.get('format')}, but this Headwater reads {SPACE_FORMAT}.",
            todo="Upgrade Headwater, or train the SAE again.",
        )
    if missing := {"model", "layer", "input_scale"} - about.keys():
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}.", todo="Train the SAE again.")
    scale = about["input_scale"]
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ConfigError(f"{path} says input_scale {scale!r}, which is no positive number.", todo="Fetch it again.")
    return about


def _activation(config: dict[str, Any], tensors: dict[str, Tensor], hints: Hints, source: str) -> Activation:
    import torch

    architecture = config.get("architecture") or "standard"
    kwargs = config.get("activation_fn_kwargs") or {}
    if architecture == "topk" or "topk" in (config.get("activation_fn"), config.get("activation_fn_str")):
        return TopK(hints.k_or(config.get("k", kwargs.get("k")), source))
    if architecture == "jumprelu":
        return JumpRelu(pick(tensors, "threshold", source))
    if architecture == "batchtopk":
        # A training checkpoint; for inference its running threshold takes the place of the batch.
        threshold = pick(tensors, "topk_threshold", source)
        return JumpRelu(torch.full_like(pick(tensors, "b_enc", source), float(threshold)))
    if architecture == "standard":
        return Relu()
    raise ConfigError(
        f"{source} is a {architecture} SAE, which Headwater doesn't read.",
        todo="Use a topk, batchtopk, jumprelu or standard SAE.",
    )


def _check_supported(config: dict[str, Any], source: str) -> None:
    normalisation = config.get("normalize_activations")
    if normalisation not in (None, False, True, "none", "expected_average_only_in"):
        raise ConfigError(
            f"{source} normalises every token by itself ({normalisation}), which can't be folded into its weights.",
            todo="Use an SAE with normalize_activations none or expected_average_only_in.",
        )
    if config.get("finetuning_scaling_factor"):
        raise ConfigError(
            f"{source} has a finetuning scaling factor, which Headwater doesn't read.",
            todo="Load it once with an older sae-lens, fold the factor and save it again.",
        )


def _input_scale(config: dict[str, Any], hints: Hints, source: str) -> float:
    expects_scaled = config.get("normalize_activations") in (True, "expected_average_only_in")
    if expects_scaled and hints.input_scale is None:
        raise ConfigError(
            f"{source} wants its input scaled to a mean norm of sqrt(d_model), but doesn't say by how much.",
            todo="Set input_scale: sqrt(d_model) divided by the mean norm of the activations it was trained on.",
        )
    return 1.0 if hints.input_scale is None else hints.input_scale


def _check_sizes(config: dict[str, Any], space: FeatureSpace, source: str) -> None:
    for key, size in (("d_in", space.d_model), ("d_sae", space.width)):
        if config.get(key, size) != size:
            raise ConfigError(
                f"{source} says {key} {config[key]} in {CFG_FILE}, but its weights have {size}.",
                todo="The folder mixes two SAEs: fetch it again.",
            )
