"""A model's files on this machine: their place, what makes them the same elsewhere, the tokenizer and chat format."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.llm.chat import ChatFormat
from headwater.llm.types import EngineIdentity
from headwater.llm.weights import chat_template_sha256, files_sha256, model_folder, tokenizer_sha256, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalModel:
    """A model folder or Hub id, looked at when first needed.

    `name` goes into the identity instead of a folder's path; by default the folder's own name. `cache` is a folder
    where hashes of weight files are remembered. Raises `ConfigError` for a model that is not there, has pickled weights
    or needs code of its own while `trust_remote_code` is false.
    """

    def __init__(
        self,
        *,
        model: str | Path,
        engine: str,
        dtype: str,
        name: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache: Path | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"There is no dtype {dtype!r}.", todo="Use one of float32, bfloat16, float16.")
        self._asked_for = model
        self._engine = engine
        self._dtype = dtype
        self._name = name
        self._revision = revision
        self._trust = trust_remote_code
        self._cache = cache

    @cached_property
    def folder(self) -> Path:
        """The local model folder."""
        return model_folder(self._asked_for, revision=self._revision, trust_remote_code=self._trust)

    @cached_property
    def identity(self) -> EngineIdentity:
        """Read from the files: neither torch nor transformers is imported for it."""
        is_folder = Path(self._asked_for).expanduser().is_dir()
        return EngineIdentity(
            engine=self._engine,
            model=self._name or (self.folder.resolve().name if is_folder else str(self._asked_for)),
            revision=files_sha256(weight_files(self.folder), self._cache),
            tokenizer=tokenizer_sha256(self.folder),
            chat_template=chat_template_sha256(self.folder),
            dtype=self._dtype,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=self._trust, use_fast=True
            )
        except (OSError, ValueError) as error:
            raise self._unloadable("tokenizer", error) from error

    @cached_property
    def chat_format(self) -> ChatFormat:
        return ChatFormat(self.tokenizer)

    def _unloadable(self, what: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"The {what} in {self.folder} can't be loaded: {error}",
            todo="Check that the folder is whole; set trust_remote_code only for code that you have read.",
        )
