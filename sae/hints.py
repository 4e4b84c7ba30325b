"""What a caller knows about an SAE that its files may not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hints:
    """Each is empty or None when the caller doesn't know."""

    model: str = ""
    fallback_model: str = ""
    """Taken where neither `model` nor the SAE's files name one."""
    layer: int | None = None
    k: int | None = None
    input_scale: float | None = None

    def model_or(self, found: str, source: str) -> str:
        """The caller's name for the model, else the one found: the same weights go by several names."""
        name = self.model or found or self.fallback_model
        if not name:
            raise ConfigError(f"{source} doesn't say which model it was made for.", todo="Set model to its name.")
        return name

    def layer_or(self, found: int | None, source: str) -> int:
        """The layer found in the SAE's files, which the caller may fill in but not contradict."""
        return _agreed("layer", self.layer, found, source, "the 0-based index of the decoder block")

    def k_or(self, found: int | None, source: str) -> int:
        """The k found in the SAE's files, which the caller may fill in but not contradict."""
        return _agreed("k", self.k, found, source, "the number of features that it keeps per token")


def _agreed(name: str, given: int | None, found: int | None, source: str, meaning: str) -> int:
    if found is not None and type(found) is not int:
        raise ConfigError(f"{source} says {name} {found!r}, which is no whole number.", todo="Fetch the SAE again.")
    if found is None and given is None:
        raise ConfigError(f"{source} doesn't say its {name}.", todo=f"Set {name}: {meaning}.")
    if found is not None and given is not None and found != given:
        raise ConfigError(f"{source} has {name} {found}, but {given} was asked for.", todo=f"Set {name}: {found}.")
    return found if found is not None else given  # type: ignore[return-value]


@contextmanager
def malformed(source: str) -> Iterator[None]:
    """What goes wrong inside because a file holds other things than its kind should becomes a ConfigError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigError(
            f"{source} isn't laid out as an SAE of its kind: {type(error).__name__}: {error}.",
            todo="Fetch it again, or convert it to a sae-lens folder.",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises ConfigError when there is none."""
    import json

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}.", todo="Fetch the SAE again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object.", todo="Fetch the SAE again.")
    return content


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; raises ConfigError when it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can't be read as safetensors: {error}.", todo="Fetch the SAE again.") from error


def pick(tensors: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    """`tensors[name]`, or a ConfigError that lists what is there."""
    if name not in tensors:
        raise ConfigError(
            f"{source} lacks the tensor {name}; it has {', '.join(sorted(tensors)) or 'none'}.",
            todo="Fetch the SAE again, or point to the folder of another one.",
        )
    return tensors[name]
