"""Model folders on disk: finding one, refusing what must not be loaded, and naming its contents by hash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from headwater.core.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_CHUNK_BYTES = 1 << 22
_MEMO_NAME = "sha256.json"

_known: dict[str, str] = {}


def model_folder(model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`: itself a folder, or a Hub id whose files are fetched or already in the Hub's cache.

    Raises `ConfigError` when there is no such model or its weights are not safetensors.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _from_hub(str(model), revision, trust_remote_code)
    weight_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by name; pickled weights can run code when loaded and are refused."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is not a transformers model folder: config.json is missing.",
            todo="Give a folder that holds config.json, *.safetensors and the tokenizer.",
        )
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
        what = f"only pickled weights ({', '.join(pickled)})" if pickled else "no weights"
        raise ConfigError(
            f"{folder} holds {what}.",
            todo="Only safetensors are loaded, because a pickle can run code. Convert it once where you trust it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder).",
        )
    return found


def file_sha256(path: Path, memo: Path | None = None) -> str:
    """sha256 of a file as 64 hex digits.

    A file is read once: the answer is remembered under its resolved path, size and time of change, in this process and,
    when `memo` names a folder, in a small JSON file there.
    """
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if key not in _known and memo is not None:
        _known.update(_read_memo(memo))
    if key not in _known:
        _known[key] = _hash_file(path)
        if memo is not None:
            _write_memo(memo, key)
    return _known[key]


def files_sha256(paths: Iterable[Path], memo: Path | None = None) -> str:
    """One sha256 for several files: of their names and hashes, in the order of their names."""
    lines = [f"{path.name} {file_sha256(path, memo)}" for path in sorted(paths, key=lambda p: p.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tokenizer_sha256(folder: Path) -> str:
    """One sha256 for the tokenizer files of a model folder."""
    return files_sha256(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def chat_template_sha256(folder: Path) -> str:
    """sha256 of the chat template as it lies in a model folder; of the empty text when there is none.

    Read from the files themselves, so that a model can be named without importing what would run it.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return file_sha256(jinja)
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template") or ""
    except (OSError, ValueError, AttributeError):
        template = ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_hub(model: str, revision: str | None, trust_remote_code: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"There is no model folder {model}.", todo="Check the path.")
    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"There is no folder {model}, and the Hub shows no model of that name{at}.",
            todo="Check the name; a private or gated model needs `hf auth login` first.",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"There is no folder {model}, the Hub's cache doesn't hold such a model, and the Hub can't be reached.",
            todo=f"Run `hf download {model}` where there is a network, or give the path of a model folder.",
        ) from error


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_memo(memo: Path) -> dict[str, str]:
    try:
        known = json.loads((memo / _MEMO_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}


def _write_memo(memo: Path, key: str) -> None:
    """Lost updates of a concurrent writer only cost a hash later, so a rename without a lock is enough."""
    memo.mkdir(parents=True, exist_ok=True)
    known = _read_memo(memo) | {key: _known[key]}
    temporary = memo / f".{_MEMO_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(memo / _MEMO_NAME)
