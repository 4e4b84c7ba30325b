"""Content addresses: what a stage's output depends on, hashed, and readable when two of them differ."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEME = 1
"""Raised when the meaning of a fingerprint changes; old outputs are then not found rather than misread."""

_CHUNK_BYTES = 1 << 20
_PLUMBING = ("headwater.stages.base", "headwater.stages.run")
_HELPER_FLOORS = ("headwater.sae", "headwater.verifiers", "headwater.data_cards", "headwater.stages")


@dataclass(frozen=True)
class Fingerprint:
    """The readable parts and their digest. `parts` must be plain JSON."""

    parts: Mapping[str, Any]

    @functools.cached_property
    def digest(self) -> str:
        """24 hex digits (96 bits): short enough for a folder name, far beyond accidental collision."""
        return sha256_text(canonical_json({"scheme": SCHEME, **self.parts}))[:24]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line per leaf that differs between two sets of parts: `config.k: 8 → 16`."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        path = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{path}.")
        elif before != after:
            lines.append(f"{path}: {_short(before)} → {_short(after)}")
    return lines


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; the same text for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_hash(module: str) -> str:
    """Hash of a stage's module and of the floor-3 and floor-4 modules it imports, directly or not.

    Comments, blank lines and docstrings don't count. The helpers count because a stage whose helper changed would
    otherwise answer from a stale output; `core/` and `llm/` do not: they are plumbing, versioned by `SCHEME` and by
    the engine's identity.
    """
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        path = _module_path(name)
        if path is None:
            continue
        code, imports = _normalised(path, path.stat().st_mtime_ns)
        seen[name] = code
        waiting += [i for i in imports if i.startswith(_HELPER_FLOORS) and i not in _PLUMBING]
    return sha256_text(canonical_json(seen))[:24]


@functools.lru_cache(maxsize=512)
def _normalised(path: Path, _mtime_ns: int) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_text("utf-8"))
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [item for item in node.body if not _is_docstring(item)] or [ast.Pass()]
    return sha256_text(ast.dump(tree))[:24], tuple(imports)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _module_path(module: str) -> Path | None:
    """Where `headwater.a.b` lies, without importing it; modules of others are looked up the ordinary way."""
    root, *rest = module.split(".")
    if root != "headwater":
        import importlib.util

        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec is not None and spec.origin else None
    base = Path(__file__).parent.parent.joinpath(*rest)
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _short(value: Any, limit: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
