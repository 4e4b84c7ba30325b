"""Reading a published SAE by its name in sae-lens' registry: out of the local Hugging Face cache, never the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.sae.hints import Hints
from headwater.sae.read_saelens import check_model_untouched, layer_of_hook
from headwater.sae.saelens import quiet_sae_lens
from headwater.sae.space import Activation, FeatureSpace, JumpRelu, Relu, TopK

if TYPE_CHECKING:
    from sae_lens import SAE

_PICKLED_CONVERSIONS = frozenset(
    {"qwen_scope", "goodfire", "deepseek_r1", "dictionary_learning_1", "connor_rob_hook_z"}
)
"""Formats of the registry whose files are pickles."""


def read_release(release: str, sae_id: str, hints: Hints, *, allow_pickle: bool) -> FeatureSpace:
    """The SAE `sae_id` of `release`. Raises ConfigError when the name is unknown or its files aren't in the cache."""
    quiet_sae_lens()
    from sae_lens import SAE
    from sae_lens.loading.pretrained_saes_directory import get_pretrained_saes_directory

    known = get_pretrained_saes_directory().get(release)
    if known is None:
        raise ConfigError(
            f"{release} is neither a path on this machine nor a release that sae-lens knows.",
            todo="Check the path, or take a name from sae-lens' table of pretrained SAEs.",
        )
    if sae_id not in known.saes_map:
        some = ", ".join(list(known.saes_map)[:4])
        raise ConfigError(f"The release {release} has no SAE {sae_id!r}.", todo=f"Set sae_id, for example to {some}.")
    if known.conversion_func in _PICKLED_CONVERSIONS and not allow_pickle:
        raise ConfigError(
            f"The release {release} consists of pickled files, which may run code when they are opened.",
            todo="Set allow_pickle: true to read them with torch's restricted unpickler (weights_only).",
        )
    with _offline(), _plain_errors(release, known.repo_id):
        sae = SAE.from_pretrained(release, sae_id, device="cpu", dtype="float32")
    return _converted(sae, hints, f"{release}/{sae_id}", known.norm_scaling_factor.get(sae_id))


def _converted(sae: SAE[Any], hints: Hints, source: str, scale: float | None) -> FeatureSpace:
    config = sae.cfg
    if config.normalize_activations != "none":
        raise ConfigError(
            f"{source} normalises its input ({config.normalize_activations}) in a way that can't be folded.",
            todo="Use another SAE.",
        )
    check_model_untouched(config.metadata.model_from_pretrained_kwargs, source)
    space = FeatureSpace.from_weights(
        {name: getattr(sae, name) for name in ("W_enc", "W_dec", "b_enc", "b_dec")},
        _activation(sae, source),
        model=hints.model_or(config.metadata.model_name or "", source),
        layer=hints.layer_or(layer_of_hook(config.metadata.hook_name or ""), source),
        subtract_b_dec=config.apply_b_dec_to_input,
        decoder_norm_scales=getattr(config, "rescale_acts_by_decoder_norm", False),
    )
    return space if scale is None else space.in_unit(scale)


def _activation(sae: SAE[Any], source: str) -> Activation:
    match sae.cfg.architecture():
        case "topk":
            return TopK(sae.cfg.k)
        case "jumprelu":
            return JumpRelu(sae.threshold)
        case "standard":
            return Relu()
        case other:
            raise ConfigError(f"{source} is a {other} SAE, which Headwater doesn't read.", todo="Use another SAE.")


@contextmanager
def _offline() -> Iterator[None]:
    """huggingface_hub asks the network first, even for a file in its cache, unless it is told that there is none."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _plain_errors(release: str, repo_id: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, FileNotFoundError) as error:
        raise ConfigError(
            f"The files of the SAE release {release} aren't in this machine's Hugging Face cache.",
            todo=f"Fetch them once where there is a network (hf download {repo_id}), or give a folder.",
        ) from error
