"""Content addresses: what a stage's output depends on, hashed, and readable when two of them differ."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError
from headwater.core.redact import redact_values

SCHEME = 1
"""Raised when the meaning of a fingerprint changes; old outputs are then not found rather than misread."""

_PLUMBING = {f"headwater.stages.{name}" for name in ("base", "run", "row_runner", "calls", "engines")}
_HELPERS = tuple(
    f"headwater.{name}"
    for name in ("sae", "verifiers", "data_cards", "stages", "core.text", "llm.chat", "llm.hidden", "llm.score")
)
_ABSENT = object()
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
"""Kept, because `json.dumps` builds one per call and row ids are made by the million."""


@dataclass(frozen=True)
class Fingerprint:
    """The readable parts and their digest. `parts` must be plain JSON."""

    parts: Mapping[str, Any]

    @functools.cached_property
    def digest(self) -> str:
        """24 hex digits (96 bits): short enough for a folder name, far beyond accidental collision."""
        return sha256_text(canonical_json({"scheme": SCHEME, **self.parts}))[:24]

    def as_json(self) -> dict[str, Any]:
        """What the manifest keeps, so that a later run can say what differs; never a credential."""
        return {"digest": self.digest, "scheme": SCHEME, "parts": redact_values(self.parts)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per leaf that differs between two sets of parts: `config.k: 8 → 16`.

    Compared as the JSON they are hashed as: a tuple equals the list that a manifest gives back.
    """
    return list(_differences(json.loads(canonical_json(dict(old))), json.loads(canonical_json(dict(new))), ""))


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}[{i}]")
    elif old != new or type(old) is not type(new):
        yield f"{path}: {_short(old)} → {_short(new)}"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; the same text for equal values."""
    return _CANONICAL.encode(value)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_hash(module: str) -> str:
    """Hash of a stage's module and of the modules it imports, directly or not, that shape rows.

    These are floors 3 and 4, `core/text.py`, and of `llm/` what decides which tokens are measured; for a stage from
    elsewhere, its own package too. They count because a stage whose helper changed would otherwise answer from a stale
    output. The rest of `core/` and `llm/` does not: it is plumbing, versioned by `SCHEME` and by the engine's identity.
    Comments, blank lines, docstrings and the Python version don't count either.

    Raises ConfigError when `module` has no source file (a notebook cell): its edits could not be seen.
    """
    own = module.split(".", maxsplit=1)[0]
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = None if name in seen else _module_path(name)
        if path is not None:
            code, imports = _normalised(path, path.stat().st_mtime_ns, _package(name, path))
            seen[name] = code
            waiting += [found for found in imports if _counts(found, own)]
    if module not in seen:
        raise ConfigError(f"The module {module!r} of a stage has no source file.", todo="Define the stage in a file.")
    return sha256_text(canonical_json(seen))[:24]


def _counts(module: str, own: str) -> bool:
    if module.split(".", maxsplit=1)[0] != "headwater":
        return module.split(".", maxsplit=1)[0] == own
    return module not in _PLUMBING and any(f"{module}.".startswith(f"{helper}.") for helper in _HELPERS)


@functools.lru_cache(maxsize=512)
def _normalised(path: Path, _mtime_ns: int, package: str) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_bytes())
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imports += [source, *(f"{source}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [item for item in node.body if not _is_docstring(item)]
    return sha256_text(canonical_json(_plain(tree)))[:24], tuple(imports)


def _plain(node: Any) -> Any:
    """The tree as JSON without positions and empty fields, which differ between Python versions in `ast.dump`."""
    if isinstance(node, ast.AST):
        fields = {name: _plain(value) for name, value in ast.iter_fields(node) if value is not None and value != []}
        return {type(node).__name__: fields} if fields else type(node).__name__
    if isinstance(node, list):
        return [_plain(item) for item in node]
    return repr(node)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _package(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _module_path(module: str) -> Path | None:
    """Where the source of `module` lies. Nothing is imported: a name imported *from* a module may look like one."""
    root, *rest = module.split(".")
    if root == "headwater":
        return _source(Path(__file__).parent.parent.joinpath(*rest))
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return Path(loaded) if loaded.endswith(".py") else None
    spec = importlib.util.find_spec(root) if root not in sys.builtin_module_names and root != "__main__" else None
    if spec is None or (rest and spec.submodule_search_locations is None):
        return None
    if not rest:
        return Path(spec.origin) if spec.has_location and spec.origin and spec.origin.endswith(".py") else None
    found = (_source(Path(place).joinpath(*rest)) for place in spec.submodule_search_locations or ())
    return next(filter(None, found), None)


def _source(base: Path) -> Path | None:
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _short(value: Any, limit: int = 60) -> str:
    if value is _ABSENT:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
