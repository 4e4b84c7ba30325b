"""Every format is built from known weights and must encode as an independent dense computation does."""

from __future__ import annotations

import json
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.sae.load import load_space


def _top5(pre: Tensor) -> Tensor:
    kth = pre.sort(dim=1, descending=True).values[:, 4:5]
    return torch.where(pre >= kth, pre, 0.0).clamp(min=0)


def _centred_top5(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return _top5(torch.einsum("td,dw->tw", x - weights["b_dec"], weights["W_enc"]) + weights["b_enc"])


def _write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def _sae_lens(folder: Path, weights: dict[str, Tensor], **config: object) -> Path:
    metadata = {"sae_lens_version": "6.54.12", "model_name": "gpt2", "hook_name": "blocks.4.hook_resid_post"}
    whole = {"architecture": "topk", "k": 5, "d_in": 12, "d_sae": 40, "dtype": "float32", "metadata": metadata}
    return _write(folder, whole | config, weights, "sae_weights.safetensors")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_sae_lens_folder(weights: dict[str, Tensor], x: Tensor, tmp_path: Path) -> None:
    space = load_space(_sae_lens(tmp_path / "sae", weights))
    torch.testing.assert_close(space.encode(x), _centred_top5(weights, x))
    assert (space.model, space.layer, space.d_model, space.width) == ("gpt2", 4, 12, 40)


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("architecture", ["topk", "jumprelu", "standard"])
def test_sae_lens_itself_encodes_the_same(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path, architecture: str, rescaled: bool
) -> None:
    from headwater.sae.saelens import quiet_sae_lens

    quiet_sae_lens()
    from sae_lens import SAE

    if architecture == "jumprelu":
        weights["threshold"] = torch.linspace(0, 5, 40)
    how = {"rescale_acts_by_decoder_norm": rescaled} if architecture == "topk" else {}
    folder = _sae_lens(tmp_path / "sae", weights, architecture=architecture, **how)
    torch.testing.assert_close(load_space(folder).encode(x), SAE.load_from_disk(folder).encode(x), rtol=1e-4, atol=1e-4)


def test_a_sae_lens_folder_from_before_version_6(weights: dict[str, Tensor], x: Tensor, tmp_path: Path) -> None:
    from headwater.sae.saelens import quiet_sae_lens

    quiet_sae_lens()
    from sae_lens import SAE

    config = {
        "architecture": "standard",
        "d_in": 12,
        "d_sae": 40,
        "dtype": "float32",
        "model_name": "pythia",
        "hook_point": "blocks.4.hook_resid_pre",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 5},
        "normalize_activations": False,
    }
    folder = _write(tmp_path / "sae", config, weights, "sae_weights.safetensors")
    space = load_space(folder)
    torch.testing.assert_close(space.encode(x), SAE.load_from_disk(folder).encode(x))
    assert (space.model, space.layer) == ("pythia", 3)


def test_a_batchtopk_checkpoint_is_measured_with_its_threshold(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path
) -> None:
    folder = _sae_lens(
        tmp_path / "s", weights | {"topk_threshold": torch.tensor(2.5).double()}, architecture="batchtopk"
    )
    pre = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    torch.testing.assert_close(load_space(folder).encode(x), torch.where(pre > 2.5, pre, 0.0))


def test_a_sae_lens_folder_that_wants_scaled_input(weights: dict[str, Tensor], x: Tensor, tmp_path: Path) -> None:
    folder = _sae_lens(tmp_path / "sae", weights, normalize_activations="expected_average_only_in")
    with pytest.raises(ConfigError, match="input_scale"):
        load_space(folder)
    space = load_space(folder, input_scale=0.25)
    torch.testing.assert_close(space.encode(x), _centred_top5(weights, x * 0.25))
    assert space.input_scale == 0.25


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture": "gated"}, "gated"),
        ({"normalize_activations": "layer_norm"}, "layer_norm"),
        ({"finetuning_scaling_factor": True}, "finetuning"),
        ({"d_sae": 41}, "d_sae 41 in cfg.json, but its weights have 40"),
        ({"k": None}, "doesn't say its k"),
        ({"metadata": {"hook_name": "blocks.4.hook_mlp_out", "model_name": "gpt2"}}, "hook_mlp_out"),
        ({"metadata": {"hook_name": "blocks.0.hook_resid_pre", "model_name": "gpt2"}}, "hook_resid_pre"),
        ({"metadata": {"hook_name": "blocks.4.hook_resid_post"}}, "which model"),
        ({"metadata": {"model_name": "gpt2"}}, "doesn't say its layer"),
    ],
)
def test_a_sae_lens_folder_that_cannot_be_used_says_why(
    weights: dict[str, Tensor], tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_space(_sae_lens(tmp_path / "sae", weights, **config))
    assert caught.value.todo


def test_a_layer_that_contradicts_the_folder_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has layer 4, but 5 was asked for"):
        load_space(_sae_lens(tmp_path / "sae", weights), layer=5)


def test_a_missing_tensor_is_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    del weights["b_enc"]
    with pytest.raises(ConfigError, match="lacks the tensor b_enc"):
        load_space(_sae_lens(tmp_path / "sae", weights))


def test_an_sae_of_a_model_that_transformer_lens_reshaped_is_refused(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    reshaped = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    metadata = {"model_name": "gpt2", "hook_name": "blocks.4.hook_resid_post"} | reshaped
    with pytest.raises(ConfigError, match="center_writing_weights"):
        load_space(_sae_lens(tmp_path / "sae", weights, metadata=metadata))


def test_damaged_files_are_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    folder = _sae_lens(tmp_path / "sae", weights)
    (folder / "sae_weights.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ConfigError, match=r"sae_weights\.safetensors can't be read"):
        load_space(folder)
    (folder / "cfg.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cfg\.json can't be read"):
        load_space(folder)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"k": "four"}, "k 'four', which is no whole number"),
        ({"metadata": "x"}, "isn't laid out as an SAE of its kind"),
    ],
)
def test_a_config_of_another_shape_is_named(
    weights: dict[str, Tensor], tmp_path: Path, config: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"^mine .*{what}"):
        load_space(_sae_lens(tmp_path / "mine", weights, **config), layer=4)


def test_an_sae_of_another_model_is_refused_unless_the_name_is_said_to_mean_the_same(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    space = load_space(_sae_lens(tmp_path / "sae", weights), fallback_model="smollm2-135m")
    assert space.model == "gpt2", "what a file says is not replaced by the fallback"
    with pytest.raises(ConfigError, match=r"made for gpt2, but the recipe's model is smollm2-135m.*made_for: gpt2"):
        space.named_for("smollm2-135m")
    assert space.named_for("openai-community/GPT2").model == "openai-community/GPT2"
    assert space.named_for("smollm2-135m", also_known_as="gpt2").model == "smollm2-135m"


def _sparsify(run: Path, hookpoint: str, weights: dict[str, Tensor], **config: object) -> Path:
    tensors = {
        "encoder.weight": weights["W_enc"].T,
        "encoder.bias": weights["b_enc"],
        "W_dec": weights["W_dec"],
        "b_dec": weights["b_dec"],
    }
    whole = {"d_in": 12, "num_latents": 40, "k": 5, "normalize_decoder": True, "activation": "topk"}
    folder = _write(run / hookpoint, whole | config, tensors, "sae.safetensors")
    (run / "config.json").write_text(json.dumps({"model": "EleutherAI/pythia-160m"}))
    return folder


@pytest.mark.parametrize("normalize_decoder", [False, True])
def test_a_sparsify_folder(weights: dict[str, Tensor], x: Tensor, tmp_path: Path, normalize_decoder: bool) -> None:
    space = load_space(_sparsify(tmp_path / "run", "layers.6", weights, normalize_decoder=normalize_decoder))
    torch.testing.assert_close(space.encode(x), _centred_top5(weights, x))
    torch.testing.assert_close(space.w_dec, weights["W_dec"])
    assert (space.model, space.layer) == ("EleutherAI/pythia-160m", 6)


def test_a_sparsify_run_of_several_hookpoints_asks_which(weights: dict[str, Tensor], x: Tensor, tmp_path: Path) -> None:
    for hookpoint in ("layers.6", "layers.7"):
        _sparsify(tmp_path / "run", hookpoint, weights)
    with pytest.raises(ConfigError, match=r"layers\.6, layers\.7"):
        load_space(tmp_path / "run")
    assert load_space(tmp_path / "run", sae_id="layers.7").layer == 7


def test_sparsify_weights_in_bfloat16_are_read_as_float32(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path
) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    space = load_space(_sparsify(tmp_path / "run", "layers.6", halves))
    assert space.w_enc.dtype == torch.float32
    torch.testing.assert_close(space.encode(x), _centred_top5({n: t.float() for n, t in halves.items()}, x))


@pytest.mark.parametrize(
    ("hookpoint", "config", "words"),
    [
        ("layers.6.mlp", {}, r"layers\.6\.mlp"),
        ("layers.6", {"transcode": True}, "transcoder"),
        ("layers.6", {"skip_connection": True}, "skip connection"),
        ("layers.6", {"activation": "groupmax"}, "groupmax"),
    ],
)
def test_sparsify_coders_that_are_no_topk_autoencoder_are_refused(
    weights: dict[str, Tensor], tmp_path: Path, hookpoint: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_space(_sparsify(tmp_path / "run", hookpoint, weights, **config))


def _fac(path: Path, weights: dict[str, Tensor]) -> Path:
    state = {name: weights[name] for name in ("W_enc", "b_enc", "b_dec")} | {"mask": torch.ones(40)}
    torch.save({"weight": state, "config": {"d_inp": 12, "d_hide": 40, "topK": 5}}, path)
    return path


def test_an_fac_checkpoint_has_tied_weights_and_counts_layers_from_one(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path
) -> None:
    space = load_space(_fac(tmp_path / "TopK7_l16_h40_epoch3.pth", weights), model="Llama", allow_pickle=True)
    values = _centred_top5(weights, x)
    torch.testing.assert_close(space.encode(x), values)
    torch.testing.assert_close(space.decode(values), values @ weights["W_enc"].T + weights["b_dec"])
    assert (space.model, space.layer) == ("Llama", 15)


def test_an_fac_checkpoint_without_a_layer_in_its_name_asks_for_it(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = _fac(tmp_path / "sae.pth", weights)
    with pytest.raises(ConfigError, match="doesn't say its layer"):
        load_space(path, model="Llama", allow_pickle=True)
    assert load_space(path, model="Llama", layer=15, allow_pickle=True).layer == 15
    with pytest.raises(ConfigError, match="which model"):
        load_space(path, layer=15, allow_pickle=True)


def test_a_qwen_scope_checkpoint_is_transposed_and_does_not_centre(
    weights: dict[str, Tensor], x: Tensor, tmp_path: Path
) -> None:
    folder = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_5"
    folder.mkdir()
    state = {
        "W_enc": weights["W_enc"].T,
        "W_dec": weights["W_dec"].T,
        "b_enc": weights["b_enc"],
        "b_dec": weights["b_dec"],
    }
    torch.save(state, folder / "layer9.sae.pt")
    space = load_space(folder / "layer9.sae.pt", allow_pickle=True)
    values = _top5(x @ weights["W_enc"] + weights["b_enc"])
    torch.testing.assert_close(space.encode(x), values)
    torch.testing.assert_close(space.decode(values), values @ weights["W_dec"] + weights["b_dec"])
    assert (space.model, space.layer) == ("Qwen/Qwen3-1.7B-Base", 9)


def test_pickled_files_are_refused_unless_allowed(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = _fac(tmp_path / "TopK7_l16_h40_epoch3.pth", weights)
    with pytest.raises(ConfigError, match="allow_pickle"):
        load_space(path, model="Llama")


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("harm.txt"), "ran"))


def test_a_pickle_with_code_never_runs_even_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": _Harmful(), "config": {}}, "harm_l3_.pth")
    with pytest.raises(ConfigError, match="plain tensors"):
        load_space("harm_l3_.pth", model="m", allow_pickle=True)
    Path("old.pt").write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(ConfigError, match="plain tensors"):
        load_space("old.pt", model="m", allow_pickle=True)
    assert not Path("harm.txt").exists()


def test_a_pickle_that_holds_no_sae_is_refused(tmp_path: Path) -> None:
    torch.save({"optimizer": {}}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="neither an FAC checkpoint"):
        load_space(tmp_path / "a.pt", allow_pickle=True)


@pytest.mark.parametrize("content", [b"", b"junk", b"junk" * 100])
def test_a_file_that_is_no_pickle_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.pth can't be read as plain tensors"):
        load_space(tmp_path / "a.pth", allow_pickle=True)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_of_any_protocol_is_refused_without_a_warning_before_it(
    tmp_path: Path, protocol: int, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "a.pth").write_bytes(pickle.dumps({"weight": print}, protocol))
    with pytest.raises(ConfigError, match=r"a\.pth can't be read as plain tensors"):
        load_space(tmp_path / "a.pth", allow_pickle=True)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("content", [{"weight": 5, "config": 3}, {"W_enc": 1, "W_dec": 2}])
def test_a_pickle_with_the_right_names_and_wrong_content_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"a\.pth isn't laid out as an SAE of its kind"):
        load_space(tmp_path / "a.pth", allow_pickle=True)


@pytest.mark.parametrize("name", ["notes.txt", "weights.safetensors"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=name):
        load_space(tmp_path / name)


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cfg\.json"):
        load_space(tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def _cached(cache: Path, repo: str, folder: str, weights: dict[str, Tensor], **config: object) -> None:
    root = cache / f"models--{repo.replace('/', '--')}"
    _sae_lens(root / "snapshots" / ("a" * 40) / folder, weights, **config)
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)


def test_a_release_is_read_from_the_local_cache(weights: dict[str, Tensor], x: Tensor, hub_cache: Path) -> None:
    metadata = {"sae_lens_version": "6.54.12", "model_name": "pythia-70m", "hook_name": "blocks.3.hook_resid_post"}
    _cached(hub_cache, "ctigges/pythia-70m-deduped__res-sm_processed", "3-res-sm", weights, metadata=metadata)
    space = load_space("pythia-70m-deduped-res-sm", sae_id="blocks.3.hook_resid_post")
    torch.testing.assert_close(space.encode(x), _centred_top5(weights, x))
    assert (space.model, space.layer) == ("pythia-70m", 3)


def test_a_release_that_is_not_cached_says_how_to_fetch_it(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"aren't in this machine's Hugging Face cache.*jbloom"):
        load_space("gpt2-small-res-jb", sae_id="blocks.4.hook_resid_pre")


def test_a_release_needs_one_of_its_saes(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0\.hook_resid_pre"):
        load_space("gpt2-small-res-jb")


def test_a_pickled_release_needs_leave(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match="allow_pickle"):
        load_space("qwen-scope-3-1.7b-base-w32k-l50", sae_id="layer0")


@pytest.mark.parametrize("name", ["no/such/folder", "gone.pth"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no file or folder {name}"):
        load_space(name)


def test_an_unknown_name_is_neither_path_nor_release(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match="neither a path"):
        load_space("no-such-sae")
