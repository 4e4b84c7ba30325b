"""Model folders: what is refused, and hashes that are computed once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from headwater.core.errors import ConfigError
from headwater.llm import weights


def make_folder(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", pytorch_model__bin=b"cos\nsystem\n")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model.bin\).*safetensors"):
        weights.model_folder(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        weights.model_folder(make_folder(tmp_path / "m"))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        weights.model_folder(tmp_path)


def test_safetensors_beside_a_pickle_are_used(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", pytorch_model__bin=b"x", model__safetensors=b"y")
    assert [p.name for p in weights.weight_files(weights.model_folder(folder))] == ["model.safetensors"]


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no model folder"):
        weights.model_folder(tmp_path / "nowhere")


def test_a_hub_model_without_a_network_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="hf download some-org/some-model"):
        weights.model_folder("some-org/some-model")


def test_a_hash_is_that_of_the_bytes_and_changes_with_them(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    assert weights.file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two!")
    assert weights.file_sha256(file) == hashlib.sha256(b"two!").hexdigest()


def test_a_remembered_hash_spares_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"one")
    right = weights.file_sha256(file, memo)
    monkeypatch.setattr(weights, "_known", {})
    monkeypatch.setattr(weights, "_hash_file", lambda path: pytest.fail("read again"))
    assert weights.file_sha256(file, memo) == right


def test_a_broken_memo_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    (tmp_path / "sha256.json").write_text("{")
    monkeypatch.setattr(weights, "_known", {})
    assert weights.file_sha256(file, tmp_path) == hashlib.sha256(b"one").hexdigest()
    assert len(json.loads((tmp_path / "sha256.json").read_text())) == 1


def test_the_hash_of_several_files_covers_names_and_contents(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    before = weights.files_sha256([a, b])
    assert weights.files_sha256([b, a]) == before
    a.write_bytes(b"2")
    b.write_bytes(b"1")
    for path in (a, b):
        os.utime(path, ns=(1, 1))
    assert weights.files_sha256([a, b]) != before
