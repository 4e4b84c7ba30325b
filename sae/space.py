"""A feature space: a sparse autoencoder (SAE) ready to measure with, and where in which model it belongs.

Whatever an SAE did to its input and its activations is folded into its weights when the space is made, so that every
space computes the same few lines on raw activations x of shape (tokens, d_model):

    pre = (x - b_dec if subtract_b_dec else x) @ w_enc + b_enc        (tokens, width)
    acts = activation(pre)
    x_hat = acts @ w_dec + b_dec                                      (tokens, d_model)

On disk it is a folder that `sae_lens.SAE.load_from_disk` reads and that encodes the same there: `cfg.json`,
`sae_weights.safetensors`, and beside them our `space.json` with the model, the layer, the unit and the training facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import ConfigError

CFG_FILE = "cfg.json"
WEIGHTS_FILE = "sae_weights.safetensors"
SPACE_FILE = "space.json"
SPACE_FORMAT = 1
"""Version of `space.json`; a reader refuses any other."""
SAE_LENS_LAYOUT = "6.0.0"
"""The first sae-lens version that reads the `cfg.json` written here."""
BLOCK_BYTES = 32 * 2**20
"""Upper bound of the one (tokens × width) buffer that encoding works in."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the k largest pre-activations of every token, and of those the positive ones (Gao et al. 2024)."""

    k: int


@dataclass(frozen=True, slots=True)
class JumpRelu:
    """Keep what lies above the feature's own threshold (Rajamanoharan et al. 2024); BatchTopK is measured so too."""

    threshold: Tensor
    """Shape (width,), in units of the pre-activations, never negative."""


@dataclass(frozen=True, slots=True)
class Relu:
    """Keep what is positive."""


Activation = TopK | JumpRelu | Relu


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """An SAE in float32. Make one with `from_weights`, `load_space` or `train_space`."""

    w_enc: Tensor
    """Shape (d_model, width)."""
    b_enc: Tensor
    """Shape (width,)."""
    w_dec: Tensor
    """Shape (width, d_model)."""
    b_dec: Tensor
    """Shape (d_model,)."""
    activation: Activation
    subtract_b_dec: bool
    model: str
    """Name of the model whose activations it reads."""
    layer: int
    """Whose output it reads: the decoder block's 0-based index."""
    input_scale: float = 1.0
    """Unit of the features' values: they count in activations multiplied by this. Already folded into the weights."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained and how well it does, as it goes to reports; JSON values."""

    @property
    def d_model(self) -> int:
        return self.w_enc.shape[0]

    @property
    def width(self) -> int:
        return self.w_enc.shape[1]

    @classmethod
    def from_weights(
        cls,
        weights: Mapping[str, Tensor],
        activation: Activation,
        *,
        model: str,
        layer: int,
        subtract_b_dec: bool = True,
        decoder_norm_scales: bool = False,
        input_scale: float = 1.0,
        facts: Mapping[str, Any] | None = None,
    ) -> FeatureSpace:
        """Fold an SAE that reads `input_scale * x` into one that reads x.

        `weights` holds W_enc (d_model, width), W_dec (width, d_model), b_enc (width,) and b_dec (d_model,).
        With `decoder_norm_scales`, pre-activations are multiplied by the norm of their decoder row before the
        activation and divided by it again before decoding (sae-lens' `rescale_acts_by_decoder_norm`).

        Raises ConfigError when shapes don't fit one another or a weight isn't finite.
        """
        w_enc, w_dec, b_enc, b_dec = (weights[name].detach().float() for name in ("W_enc", "W_dec", "b_enc", "b_dec"))
        _check_weights(w_enc, w_dec, b_enc, b_dec)
        if decoder_norm_scales:
            norms = w_dec.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
            w_enc, b_enc, w_dec = w_enc * norms, b_enc * norms, w_dec / norms[:, None]
        return cls(
            w_enc=_times(w_enc, input_scale),
            b_enc=b_enc.contiguous(),
            w_dec=_times(w_dec, 1 / input_scale),
            b_dec=_times(b_dec, 1 / input_scale),
            activation=_fitting(activation, width=w_enc.shape[1]),
            subtract_b_dec=subtract_b_dec,
            model=model,
            layer=layer,
            input_scale=input_scale,
            facts=dict(facts or {}),
        )

    def pre_activations(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Pre-activations (tokens, width) of activations (tokens, d_model), into `out` where one is given."""
        centred = x - self.b_dec if self.subtract_b_dec else x
        return torch.addmm(self.b_enc, centred, self.w_enc, out=out)

    def encode(self, x: Tensor) -> Tensor:
        """Feature values (tokens, width) of activations (tokens, d_model): dense, for small inputs only."""
        pre = self.pre_activations(x)
        match self.activation:
            case TopK(k):
                values, features = pre.topk(k, dim=-1, sorted=False)
                return torch.zeros_like(pre).scatter_(-1, features, values.relu())
            case JumpRelu(threshold):
                return pre.relu() * (pre > threshold)
            case Relu():
                return pre.relu()

    def decode(self, values: Tensor) -> Tensor:
        """Activations (tokens, d_model) from feature values (tokens, width)."""
        return values @ self.w_dec + self.b_dec

    def reconstruct(self, x: Tensor) -> Tensor:
        """What the SAE makes of activations (tokens, d_model), block by block."""
        return torch.cat([self.decode(self.encode(x[block])) for block in self.blocks(len(x))] or [x])

    def blocks(self, n_tokens: int) -> Iterator[slice]:
        """Slices that cover `n_tokens`, each small enough for one dense (tokens, width) buffer of `BLOCK_BYTES`."""
        size = max(1, BLOCK_BYTES // (4 * self.width))
        return (slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size))

    def to(self, device: torch.device | str) -> FeatureSpace:
        """The same space on another device; itself when it is there already."""
        if self.w_enc.device == torch.device(device):
            return self
        moved = {name: getattr(self, name).to(device) for name in ("w_enc", "b_enc", "w_dec", "b_dec")}
        activation = self.activation
        if isinstance(activation, JumpRelu):
            activation = JumpRelu(activation.threshold.to(device))
        return replace(self, activation=activation, **moved)

    def in_unit(self, input_scale: float) -> FeatureSpace:
        """The same space with the name of its unit restored, for weights that hold the scale already."""
        return replace(self, input_scale=input_scale)

    def with_facts(self, facts: Mapping[str, Any]) -> FeatureSpace:
        """The same space with other `facts`."""
        return replace(self, facts=dict(facts))

    def named_for(self, model: str, *, also_known_as: str = "") -> FeatureSpace:
        """The space of `model`: ConfigError if it was made for another one that isn't `also_known_as`."""
        if _short_name(self.model) not in {_short_name(model), _short_name(also_known_as)}:
            raise ConfigError(
                f"The SAE was made for {self.model}, but the recipe's model is {model}.",
                todo=f"Use {self.model}, or set made_for: {self.model} beside the SAE's source if both names stand for "
                "the same weights.",
            )
        return replace(self, model=model)

    def check_fits(self, *, model: str, layer: int, d_model: int) -> None:
        """Raise ConfigError unless the space reads activations of that size, from that block of that model."""
        if self.d_model != d_model:
            raise ConfigError(
                f"The SAE reads activations of size {self.d_model}, but {model} has hidden size {d_model}.",
                todo="Point to an SAE that was trained on this model.",
            )
        if self.layer != layer:
            raise ConfigError(
                f"The SAE reads the output of block {self.layer}, but the recipe asks for layer {layer}.",
                todo=f"Set layer: {self.layer} (blocks count from 0), or point to an SAE of layer {layer}.",
            )
        if _short_name(self.model) != _short_name(model):
            raise ConfigError(
                f"The SAE was made for {self.model}, but the recipe's model is {model}.",
                todo=f"Use {self.model}, or name the model when loading the SAE if both are the same weights.",
            )

    def save(self, folder: Path) -> None:
        """Write `cfg.json`, `sae_weights.safetensors` and `space.json` into `folder`, made if it is missing."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"W_enc": self.w_enc, "b_enc": self.b_enc, "W_dec": self.w_dec, "b_dec": self.b_dec}
        if isinstance(self.activation, JumpRelu):
            tensors["threshold"] = self.activation.threshold
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
        _write_json(folder / CFG_FILE, self._sae_lens_config())
        about = {"format": SPACE_FORMAT, "model": self.model, "layer": self.layer, "input_scale": self.input_scale}
        _write_json(folder / SPACE_FILE, about | {"facts": dict(self.facts)})

    def _sae_lens_config(self) -> dict[str, Any]:
        match self.activation:
            case TopK(k):
                own: dict[str, Any] = {"architecture": "topk", "k": k, "rescale_acts_by_decoder_norm": False}
            case JumpRelu():
                own = {"architecture": "jumprelu"}
            case Relu():
                own = {"architecture": "standard"}
        return own | {
            "d_in": self.d_model,
            "d_sae": self.width,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": self.subtract_b_dec,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": {
                "sae_lens_version": SAE_LENS_LAYOUT,
                "sae_lens_training_version": None,
                "model_name": self.model,
                "hook_name": f"blocks.{self.layer}.hook_resid_post",
                "hf_hook_name": f"model.layers.{self.layer}",
            },
        }


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Without a copy where nothing changes: the matrices of a published SAE take gigabytes."""
    return tensor.contiguous() if factor == 1.0 else (tensor * factor).contiguous()


def _check_weights(w_enc: Tensor, w_dec: Tensor, b_enc: Tensor, b_dec: Tensor) -> None:
    d_model, width = w_enc.shape
    expected = {"W_dec": (w_dec, (width, d_model)), "b_enc": (b_enc, (width,)), "b_dec": (b_dec, (d_model,))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"The SAE's {name} has shape {tuple(tensor.shape)}, where W_enc {d_model, width} asks for {shape}.",
                todo="The file is damaged or of a format that Headwater doesn't read.",
            )
    for name, tensor in {"W_enc": w_enc, "W_dec": w_dec, "b_enc": b_enc, "b_dec": b_dec}.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"The SAE's {name} holds values that aren't finite.", todo="Download or train it again.")


def _fitting(activation: Activation, *, width: int) -> Activation:
    match activation:
        case TopK(k) if not 1 <= k <= width:
            raise ConfigError(
                f"An SAE of width {width} can't keep k = {k} features.", todo=f"Set k between 1 and {width}."
            )
        case JumpRelu(threshold) if tuple(threshold.shape) != (width,):
            raise ConfigError(
                f"The SAE has width {width}, but its threshold has shape {tuple(threshold.shape)}.",
                todo="The file is damaged or of a format that Headwater doesn't read.",
            )
        case JumpRelu(threshold):
            return JumpRelu(threshold.detach().float().clamp(min=0).contiguous())
    return activation


def _short_name(model: str) -> str:
    """The name without its owner or folder: the same weights go by `org/Name` on the Hub and `Name` on a disk."""
    return model.rstrip("/").rsplit("/", 1)[-1].casefold()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
